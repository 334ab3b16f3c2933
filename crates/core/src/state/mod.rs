//! State tables without a server: what a declaration means, and the SQL its merges compile to.

pub mod batch;
pub mod compile;
pub mod declare;
pub mod fields;

/// What an aggregate function must know of a column's type; of a domain, its base type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Family {
    /// `smallint`, `integer`, `bigint`.
    Integer,
    /// `numeric`.
    Numeric,
    /// `real`, `double precision`.
    Float,
    /// `interval`.
    Interval,
    /// `boolean`.
    Boolean,
    /// `text`, `varchar`.
    Text,
    /// `jsonb`.
    Jsonb,
    /// Any array.
    Array,
    /// `hstore`, of the extension.
    Hstore,
    /// `hll`, of the extension.
    Hll,
    /// Any other.
    #[default]
    Other,
}

/// One column of a state table, as the compiler needs it.
#[derive(Clone, Debug, Default)]
pub struct Column {
    /// Its name as stored.
    pub name: String,
    /// Its name as SQL writes it.
    pub quoted: String,
    /// Its type as SQL writes it, with its collation where that is not the type's own.
    pub type_sql: String,
    /// Its type alone, as a cast writes it.
    pub bare: String,
    /// The family of its type.
    pub family: Family,
    /// The schema of its type as SQL writes it: where the operators of an extension's type are.
    pub schema: String,
    /// Whether merges write it: false for generated and identity columns, which PostgreSQL fills.
    pub written: bool,
    /// What a null or missing value in a row stands for.
    pub default: Option<String>,
    /// Whether a row's explicit null is written, other than a missing field.
    pub null_sets: bool,
    /// The less-than operator of the type's default B-tree class as `OPERATOR(schema.<)`; none where the type has no order.
    pub less: Option<String>,
    /// The equality operator of that class.
    pub equal: Option<String>,
}

/// A state table, as the compiler needs it.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Schema and name as SQL writes them.
    pub qualified: String,
    /// Its columns, in table order.
    pub columns: Vec<Column>,
    /// The primary key: indexes into `columns`, in key order.
    pub key: Vec<usize>,
    /// Whether it is partitioned.
    pub partitioned: bool,
    /// Schema and name, as SQL writes them, of the table that remembers deleted keys.
    pub tombstones: Option<String>,
}

impl Table {
    /// The index of the column of that name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|column| column.name == name)
    }
}
