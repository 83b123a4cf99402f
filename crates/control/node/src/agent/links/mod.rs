//! Asks and tells each machine or container, on a thread of its own.

pub(crate) mod container_link;
pub(crate) mod domain_link;
pub(crate) mod guest_link;
pub(crate) mod monitor;
pub(crate) mod notices;
pub(crate) mod qmp_link;
pub(crate) mod reminders;
