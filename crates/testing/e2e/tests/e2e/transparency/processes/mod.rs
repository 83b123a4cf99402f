//! Runs programs that start, trace or confine others, or change what they are.

pub(crate) mod bare;
pub(crate) mod followed;
pub(crate) mod identity;
pub(crate) mod limits;
pub(crate) mod runtimes;
pub(crate) mod sandboxes;
pub(crate) mod tracers;
