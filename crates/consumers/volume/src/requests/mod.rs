//! Locks, bounds and buffers the requests of clients.

pub mod buffer;
pub(crate) mod page_locks;
pub mod reserve;
pub(crate) mod slots;
pub(crate) mod spare;
