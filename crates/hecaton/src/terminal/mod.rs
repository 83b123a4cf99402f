//! Formats output: tables, logs, exit statuses, manual pages, completion.

pub(crate) mod completion;
pub(crate) mod failure;
pub(crate) mod logging;
pub(crate) mod man;
pub(crate) mod table;
