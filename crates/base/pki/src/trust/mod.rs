//! Holds a process's certificates and the names that it trusts; re-reads changed files.

pub(crate) mod by_role;
pub(crate) mod credentials;
pub(crate) mod outside;
pub(crate) mod peers;
pub(crate) mod watched;
