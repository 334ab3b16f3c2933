"""Watches in a restored database."""

import psycopg
import pytest
from stint import Queue, call, value
from test_restore import restore_slowly


def test_a_watch_fires_in_a_restored_database_once_it_is_activated_and_not_before(started):
    server, processes = started()
    with server.connect("app") as conn:
        conn.execute("CREATE TABLE goods (sku text PRIMARY KEY, qty int); SELECT stint.create_state('goods', 'deduplicate')")
        Queue(conn, "buy")
        conn.execute("SELECT stint.create_watch('low', 'goods', 'qty < 10', 'buy', rearm => 'qty > 20')")
        conn.execute("INSERT INTO goods VALUES ('a', 5), ('b', 30)")
        restore_slowly(server, processes, "app", "copy")
    with server.connect("copy") as conn:
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            conn.execute("UPDATE goods SET qty = 5")
        assert value(conn, "SELECT fired FROM stint.watches") == 1 and value(conn, "SELECT count(*) FROM stint.tasks") == 1
        call(conn, "activate")
        conn.execute("UPDATE goods SET qty = 12 WHERE sku = 'a'")
        conn.execute("UPDATE goods SET qty = 5")
        made = [task.payload["key"]["sku"] for task in Queue(conn, "buy", create=False).claim(9)]
        assert made == ["a", "b"], "what fired before the dump stays disarmed"
        assert value(conn, "SELECT array_agg(key) FROM stint.watch_disarmed") == ["{a}", "{b}"]
        for qty in 25, 2:
            conn.execute("UPDATE goods SET qty = %s WHERE sku = 'a'", (qty,))
        assert value(conn, "SELECT fired FROM stint.watches") == 3
