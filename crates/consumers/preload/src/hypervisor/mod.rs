//! Hands over the guest RAM of a hypervisor, and nothing else of it.

pub(crate) mod guest;
pub(crate) mod launch;
