"""What keeps old row versions from being removed, as it happens to every database: each as a context."""

import contextlib
import struct
import time

from psycopg import pq


@contextlib.contextmanager
def nothing(_server, _contender):
    """For comparison."""
    yield


@contextlib.contextmanager
def snapshot(server, contender):
    """A report that reads for a long time: REPEATABLE READ, idle in its transaction."""
    with server.cluster.connect(contender.database, autocommit=False) as conn:
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        conn.execute("SELECT count(*) FROM pg_class")
        yield
        conn.rollback()


@contextlib.contextmanager
def writer(server, contender):
    """A transaction that has written elsewhere in the database and does not end."""
    with server.cluster.connect(contender.database, autocommit=True) as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS public.elsewhere (id int)")
        conn.execute("BEGIN")
        conn.execute("INSERT INTO public.elsewhere VALUES (1)")
        yield
        conn.execute("ROLLBACK")


@contextlib.contextmanager
def slot(server, _contender):
    """A replication slot whose standby, which had hot_standby_feedback on, is gone: its last feedback holds for ever."""
    cluster = server.cluster
    cluster.sql("SELECT pg_create_physical_replication_slot('bench', true)")
    try:
        _feed_back(cluster)
        cluster.wait_until("SELECT xmin IS NOT NULL AND NOT active FROM pg_replication_slots WHERE slot_name = 'bench'", timeout=10)
        yield
    finally:
        cluster.sql("SELECT pg_drop_replication_slot('bench')")


def _feed_back(cluster):
    """Does what a standby does: streams from the slot and tells the oldest transaction its readers may need."""
    xmin = int(cluster.sql("SELECT txid_snapshot_xmin(txid_current_snapshot())"))
    start = cluster.sql("SELECT pg_current_wal_lsn()::text")
    connection = pq.PGconn.connect(f"{cluster.dsn()} replication=true".encode())
    try:
        result = connection.exec_(f"START_REPLICATION SLOT bench PHYSICAL {start}".encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise RuntimeError(f"replication did not start: {connection.error_message.decode()}")
        since_2000 = int((time.time() - 946684800) * 1e6)
        epoch, xid = divmod(xmin, 2**32)
        # Hot standby feedback: time, xmin and its epoch, catalog_xmin and its epoch.
        connection.put_copy_data(b"h" + struct.pack("!qIIII", since_2000, xid, epoch, 0, 0))
        while connection.flush():
            time.sleep(0.01)
        cluster.wait_until("SELECT xmin IS NOT NULL FROM pg_replication_slots WHERE slot_name = 'bench'", timeout=10)
    finally:
        connection.finish()


ALL = {"snapshot": snapshot, "writer": writer, "slot": slot, "none": nothing}
