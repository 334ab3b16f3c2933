//! State tables: the user's own tables with a declared merge engine. [`declare`] takes and checks declarations, [`merge`] runs what `stint_core` compiles them to.

mod alter;
mod config;
pub mod declare;
pub mod deferred;
mod dropped;
mod feed;
mod history;
mod locks;
pub mod merge;
pub mod plans;
pub mod rights;
mod rounds;
