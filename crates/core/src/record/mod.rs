//! The record without a server: what a projection's column map means, and the SQL that reads rows out of events.

pub mod compile;
pub mod cursor;
pub mod map;
