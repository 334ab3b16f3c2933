//! Points in the past: pins keep what a transaction saw, tags name pins, and `<table>_as_of` reads a state table at a tag, a position or an instant.
//!
//! As-of looks backwards: a row at a point is the before image of its key's first change after the point, else the live row.

pub mod as_of;
mod diff;
mod layout;
mod pin;
mod point;
mod probe;
mod row;
mod tag;
