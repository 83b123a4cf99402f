//! Whatever a program does, it ends as it does without Hecaton.

mod native;
pub(crate) mod overcommit;
pub(crate) mod pinned;
pub(crate) mod tracers;
pub(crate) mod wiped;
