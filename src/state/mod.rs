//! State tables: the user's own tables with a declared merge engine.

pub mod relation;
