//! Volumes, as each kind of client sees them.

pub(crate) mod disk;
pub(crate) mod drive;
pub(crate) mod file;
pub(crate) mod nbd_clients;
pub(crate) mod sharing;
pub(crate) mod volume;
