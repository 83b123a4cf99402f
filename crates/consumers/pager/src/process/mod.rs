//! Runs the pager as a process: its threads, what its node holds for it, and its end.

pub(crate) mod admission;
pub(crate) mod adopt;
pub mod adoption;
pub mod channel;
pub(crate) mod control;
pub(crate) mod guard;
pub(crate) mod housekeeping;
pub(crate) mod lifeline;
pub(crate) mod node;
pub(crate) mod sigterm;
pub(crate) mod worker;
