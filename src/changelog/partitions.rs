//! Partitioned state tables. A statement on the root fires the root's capture triggers, whose transition tables hold the rows of all partitions; one on a
//! partition fires that partition's. So root and partitions have triggers, and what the partitions' log belongs to the root, in the root's layout.
//!
//! A partition that comes or goes brings or takes its rows, which no trigger tells: CREATE TABLE … PARTITION OF, ATTACH, DETACH and DROP TABLE are noticed as
//! they run.

use super::capture::{self, Event};
use crate::errors::Fault;
use crate::spi::{self, Identity, Prepared, Session, Statement, arg};
use pgrx::PgList;
use pgrx::prelude::*;

static TREE: Statement = Statement::new(
    c"SELECT c.oid, format('%I.%I', n.nspname, c.relname), c.relkind::text, c.relpersistence::text, EXISTS (SELECT FROM stint.captures p WHERE p.relation = c.oid)
      FROM pg_partition_tree($1) t JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
      ORDER BY t.level, c.oid",
    &[pg_sys::OIDOID],
);
static ROOT: Statement =
    Statement::new(c"SELECT p.relation::oid FROM pg_partition_ancestors($1) a JOIN stint.captures p ON p.relation = a.relid", &[pg_sys::OIDOID]);
static OWNED: Statement = Statement::new(
    c"SELECT format('%I.%I', n.nspname, c.relname), pg_has_role($2, c.relowner, 'USAGE'), pg_has_role($2, n.nspowner, 'USAGE')
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $1",
    &[pg_sys::OIDOID, pg_sys::OIDOID],
);
static PROJECTIONS: Statement = Statement::new(
    c"SELECT pg_catalog.string_agg(pg_catalog.quote_ident(c.name), ', ' ORDER BY c.name) FROM stint.projection_config c
      WHERE c.relation OPERATOR(pg_catalog.=) $1",
    &[pg_sys::OIDOID],
);
static PARENT: Statement = Statement::new(c"SELECT i.inhparent FROM pg_inherits i WHERE i.inhrelid = $1", &[pg_sys::OIDOID]);

/// A table below a root, or the root itself.
pub struct Member {
    /// Its oid.
    pub oid: pg_sys::Oid,
    /// Schema and name as SQL writes them.
    pub name: String,
    kind: String,
    persistence: String,
    captured: bool,
}

/// The table and its partitions, those of partitions included, from the top; none for a table without partitions that is none.
fn tree(session: &Session, oid: pg_sys::Oid) -> Vec<Member> {
    let rows = session.run(&TREE, &[arg(oid)]);
    let member = |row| Member {
        oid: rows.must(row, 1),
        name: rows.must(row, 2),
        kind: rows.must(row, 3),
        persistence: rows.must(row, 4),
        captured: rows.must(row, 5),
    };
    (0..rows.len()).map(member).collect()
}

/// The partitions of a table, checked for being fit to be captured.
pub fn below(session: &Session, root: pg_sys::Oid, name: &str) -> Vec<Member> {
    let members: Vec<Member> = tree(session, root).into_iter().filter(|member| member.oid != root).collect();
    members.iter().for_each(|member| check(member, name));
    members
}

/// The names of a table and its partitions.
pub fn members(session: &Session, root: pg_sys::Oid, name: &str) -> Vec<String> {
    let below = tree(session, root).into_iter().filter(|member| member.oid != root).map(|member| member.name);
    std::iter::once(name.to_string()).chain(below).collect()
}

fn check(member: &Member, root: &str) {
    let reason = match (member.kind.as_str(), member.persistence.as_str()) {
        _ if member.captured => "is a state table itself",
        ("f", _) => "is a foreign table, whose changes cannot be captured",
        (_, "u") => "is unlogged, and a crash would empty it without a trace in the changelog",
        _ => return,
    };
    Fault::new(PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE, format!("{} cannot be a partition of the state table {root}: it {reason}", member.name))
        .hint("Detach it, or keep its rows in an ordinary partition.")
        .raise()
}

/// The state table that a partition belongs to; none where its root is none.
pub fn root_of(session: &Session, partition: pg_sys::Oid) -> Option<pg_sys::Oid> {
    session.run(&ROOT, &[arg(partition)]).get(0, 1)
}

/// What a utility statement will do to the partitions of a state table.
pub enum Coming {
    /// A table becomes a partition of this one, and may bring rows.
    Joins { parent: pg_sys::Oid, child: *mut pg_sys::RangeVar, rows: bool },
    /// A partition has left; its rows are logged, its triggers not removed yet.
    Left(pg_sys::Oid),
}

/// Looks at a utility statement before it runs; logs the rows of partitions that leave, while they can be read.
///
/// # Safety
/// `statement` is null or a parsed utility statement.
pub unsafe fn before(statement: *mut pg_sys::Node) -> Vec<Coming> {
    // SAFETY: the tag says what the node is.
    unsafe {
        if statement.is_null() {
            return Vec::new();
        }
        match (*statement).type_ {
            pg_sys::NodeTag::T_AlterTableStmt => altered(&*statement.cast::<pg_sys::AlterTableStmt>()),
            pg_sys::NodeTag::T_CreateStmt => created(&*statement.cast::<pg_sys::CreateStmt>()),
            pg_sys::NodeTag::T_DropStmt => {
                dropped(&*statement.cast::<pg_sys::DropStmt>());
                Vec::new()
            }
            _ => Vec::new(),
        }
    }
}

/// Finishes what [`before`] began, when the statement has run.
///
/// # Safety
/// What `coming` points to still lives.
pub unsafe fn after(coming: &[Coming]) {
    for one in coming {
        match one {
            Coming::Joins { parent, child, rows } => {
                // SAFETY: the statement's own node, as the caller promises.
                let child = unsafe { find(*child) };
                if child != pg_sys::InvalidOid {
                    joined(*parent, child, *rows);
                }
            }
            Coming::Left(child) => spi::connect(|session| {
                let _owner = Identity::owner();
                if root_of(session, *child).is_none() {
                    each(session, *child, |member| capture::drop_triggers(session, &member.name));
                }
            }),
        }
    }
}

/// # Safety
/// A node of the parser's.
unsafe fn find(name: *mut pg_sys::RangeVar) -> pg_sys::Oid {
    // SAFETY: looks a name up; nothing is locked, so that nobody waits for a statement that is not allowed.
    unsafe { pg_sys::RangeVarGetRelidExtended(name, pg_sys::NoLock as i32, pg_sys::RVROption::RVR_MISSING_OK, None, std::ptr::null_mut()) }
}

fn here() -> bool {
    // SAFETY: a catalogue look-up.
    unsafe { pg_sys::get_extension_oid(c"pg_stint".as_ptr(), true) != pg_sys::InvalidOid }
}

unsafe fn altered(statement: &pg_sys::AlterTableStmt) -> Vec<Coming> {
    // SAFETY: nodes as the parser makes them.
    unsafe {
        let commands: Vec<*mut pg_sys::AlterTableCmd> = PgList::from_pg(statement.cmds).iter_ptr().collect();
        let of = |wanted| {
            commands.iter().filter(move |command| (***command).subtype == wanted).map(|command| (**command).def.cast::<pg_sys::PartitionCmd>())
        };
        let attached: Vec<_> = of(pg_sys::AlterTableType::AT_AttachPartition).collect();
        let detached: Vec<_> = of(pg_sys::AlterTableType::AT_DetachPartition).collect();
        if attached.is_empty() && detached.is_empty() || !here() {
            return Vec::new();
        }
        let parent = find(statement.relation);
        let leaving = detached.into_iter().filter_map(|command| {
            let child = find((*command).name);
            leave(child, if (*command).concurrent { Leaves::DetachedConcurrently } else { Leaves::Detached }).then_some(Coming::Left(child))
        });
        let joining = attached.iter().map(|command| Coming::Joins { parent, child: (**command).name, rows: true });
        leaving.chain(joining).collect()
    }
}

unsafe fn created(statement: &pg_sys::CreateStmt) -> Vec<Coming> {
    // SAFETY: nodes as the parser makes them.
    unsafe {
        if statement.partbound.is_null() || !here() {
            return Vec::new();
        }
        let parent = PgList::<pg_sys::RangeVar>::from_pg(statement.inhRelations).get_ptr(0);
        parent.map(|parent| Coming::Joins { parent: find(parent), child: statement.relation, rows: false }).into_iter().collect()
    }
}

unsafe fn dropped(statement: &pg_sys::DropStmt) {
    if statement.removeType != pg_sys::ObjectType::OBJECT_TABLE || !here() {
        return;
    }
    // SAFETY: nodes as the parser makes them; each object is a list of names.
    let tables: Vec<pg_sys::Oid> =
        unsafe { PgList::<pg_sys::List>::from_pg(statement.objects).iter_ptr().map(|names| find(pg_sys::makeRangeVarFromNameList(names))).collect() };
    for table in tables.iter().copied().filter(|table| *table != pg_sys::InvalidOid) {
        // SAFETY: a catalogue look-up.
        if unsafe { pg_sys::get_rel_relispartition(table) } {
            leave(table, Leaves::Dropped);
        }
    }
}

/// How a partition leaves its table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leaves {
    Detached,
    DetachedConcurrently,
    Dropped,
}

/// Logs the rows of a partition as deleted. False where it belongs to no state table, or the caller may not take it away, which the statement itself will say.
fn leave(child: pg_sys::Oid, how: Leaves) -> bool {
    if child == pg_sys::InvalidOid {
        return false;
    }
    let identity = Identity::owner();
    spi::connect(|session| {
        let Some(root) = root_of(session, child) else { return false };
        let parents = session.run(&PARENT, &[arg(child)]);
        let Some(parent) = parents.get::<pg_sys::Oid>(0, 1) else { return false };
        let rights = |table| {
            let found = session.run(&OWNED, &[arg(table), arg(identity.caller())]);
            (found.must::<String>(0, 1), found.must::<bool>(0, 2), found.must::<bool>(0, 3))
        };
        let ((parent, owns_parent, _), (name, owns_child, owns_schema)) = (rights(parent), rights(child));
        // As PostgreSQL asks: the parent's owner detaches, the table's or its schema's drops.
        if !(if how == Leaves::Dropped { owns_child || owns_schema } else { owns_parent }) {
            return false;
        }
        if how == Leaves::DetachedConcurrently {
            Fault::new(PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED, format!("cannot detach {name} from a state table concurrently"))
                .detail("Its rows leave the state, and the changelog tells of all of them at one point.")
                .hint("Leave out CONCURRENTLY, or delete its rows first and then detach it without.")
                .raise();
        }
        // In the order in which the statement itself will take them.
        session.execute_once(&format!("LOCK TABLE ONLY {parent} IN ACCESS EXCLUSIVE MODE"));
        session.execute_once(&format!("LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE"));
        if let Some(table) = capture::name_of(session, root) {
            refuse_projected(session, root, &table, &name, if how == Leaves::Dropped { "drop" } else { "detach" });
        }
        each(session, child, |member| capture::whole(session, root, &member.name, Event::Truncate));
        true
    })
}

/// Captures a new partition from now on, and logs the rows it brings as inserted. The statement holds the locks.
fn joined(parent: pg_sys::Oid, child: pg_sys::Oid, rows: bool) {
    let _owner = Identity::owner();
    spi::connect(|session| {
        let above = session.run(&ROOT, &[arg(parent)]).get::<pg_sys::Oid>(0, 1);
        let Some(root) = above else {
            // A state table that becomes a partition would be written through a root that tells nobody.
            tree(session, child).iter().filter(|member| member.captured).for_each(|member| {
                Fault::new(PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE, format!("the state table {} cannot become a partition", member.name))
                    .hint("Run stint.drop_state first, and declare the partitioned table at the root.")
                    .raise()
            });
            return;
        };
        let Some(name) = capture::name_of(session, root) else { return };
        if rows && let Some(partition) = capture::name_of(session, child) {
            refuse_projected(session, root, &name, &partition, "attach");
        }
        each(session, child, |member| {
            check(member, &name);
            capture::create_triggers(session, &member.name, true);
            if rows {
                capture::whole(session, root, &member.name, Event::Join);
            }
        });
    });
}

/// Refuses a partition with rows that joins or leaves a projected table, which would be the fold of the record no more. The partition is locked.
fn refuse_projected(session: &Session, root: pg_sys::Oid, table: &str, partition: &str, what: &str) {
    let Some(projections) = session.run_latest(&PROJECTIONS, &[arg(root)]).get::<String>(0, 1) else { return };
    let filled = Prepared::new(&format!("SELECT EXISTS (SELECT FROM {partition})"), &[]);
    if !session.run_prepared_latest(&filled, &[]).must::<bool>(0, 1) {
        return;
    }
    let hint = if what == "attach" {
        "Attach it empty and record events for its rows; or run stint.drop_projection(…) first, and after projecting anew stint.rebuild(…)."
    } else {
        "Delete its rows by events first, or run stint.drop_projection(…)."
    };
    Fault::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("cannot {what} {partition}: it has rows, and {table} is projected from the record"),
    )
    .detail(format!("Its projections are {projections}."))
    .hint(hint)
    .raise()
}

/// A table and its partitions; also one that is no partition any more.
fn each(session: &Session, table: pg_sys::Oid, work: impl Fn(&Member)) {
    let members = tree(session, table);
    if members.is_empty()
        && let Some(name) = capture::name_of(session, table)
    {
        work(&Member { oid: table, name, kind: "r".into(), persistence: "p".into(), captured: false });
    }
    members.iter().for_each(work);
}
