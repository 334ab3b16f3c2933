//! The changelog: triggers capture every change of a state table with its images, ticks give committed changes their dense positions, and consumers read them.
//!
//! A change row carries (epoch, top-level transaction id, seq), the seq drawn while the row locks are held, so per key seq rises in commit order. A tick is a
//! snapshot. The changes of tick n are those visible in its snapshot and not in that of n−1, ordered by seq; a position is the previous tick's end plus the
//! ordinal. Nothing is stamped afterwards: positions are arithmetic on stored values, the same for every reader and for ever.

pub mod capture;
pub mod cause;
pub mod columns;
pub mod consumer;
pub mod documents;
pub mod epoch;
pub mod export;
pub mod feed;
pub mod gone;
pub mod images;
mod order;
pub mod page;
pub mod partitions;
pub mod reader;
pub mod retention;
pub mod seen;
pub mod shape;
pub mod tick;
pub mod watched;
