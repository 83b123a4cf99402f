//! Counts each byte and core of a host to one owner.

pub(crate) mod books;
pub(crate) mod cores;
pub(crate) mod ledger;
