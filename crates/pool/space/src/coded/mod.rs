//! Codes cold memory: segments of a stripe are kept in one extent each, with parities for all.

pub mod code;
pub(crate) mod decodings;
pub(crate) mod mend;
pub(crate) mod recode;
pub mod row;
pub mod stripe;
