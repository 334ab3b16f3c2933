"""Where things are."""

import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent.parent
ROOT = HERE.parents[2]
CONTENDERS = HERE / "contenders"
DOCUMENTS = ROOT / "docs/bench"

sys.path.insert(0, str(ROOT / "tests/lib"))
import cluster  # noqa: E402

Cluster = cluster.Cluster
server_user = cluster.server_user
clean_environment = cluster.clean_environment
bindir = cluster.bindir
own = cluster.own


def installed():
    """The folder with the peers and the driver, everything missing installed first."""
    return pathlib.Path(subprocess.run([HERE / "install"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
