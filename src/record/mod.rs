//! The record and its projections. `append` writes events; `order` makes their numbers rise in commit order for each key; `config` compiles projections;
//! `apply` folds events into a table and sets aside those that do not fit; `shadow` folds the record anew, for `rebuild` and `verify`.

pub mod append;
pub mod apply;
pub mod config;
pub mod expire;
pub mod feed;
pub mod freshness;
pub mod keep;
pub mod lookup;
pub mod order;
pub mod position;
pub mod project;
pub mod projection;
pub mod rebuild;
pub mod retention;
pub mod shadow;
