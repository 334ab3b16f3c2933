//! What tasks wait for beside time and budgets. `enter`: what a new task has to wait for, held still while it is written. `leave`: what follows the end of a
//! task: those that depended on it, and the next of its group.
//!
//! A task that must wait stands in `place_blocked`, with a row in `task_dependencies` for each unfinished task it depends on, and its `group_key` set until it
//! is its turn in a group of a queue with strict groups. Of such a group only the task that has its turn is ever in another place, so claims know nothing of
//! groups: a busy group with ten thousand tasks behind it has one row in ready, or none.
//!
//! Nothing is counted; the one who takes away the last reason moves the task, and sees that it is the last because it holds the lock on the blocked row while
//! it looks. Locks are taken in this order, rows of one kind in the order of their keys: the row of the task that ends, or the rows of the tasks depended on,
//! in ready, scheduled or running; rows of `group_turns`; rows of `place_blocked`. A new task locks weakly what it depends on, which keeps it from ending
//! before the new row is visible to whoever ends it.

pub mod enter;
pub mod leave;
