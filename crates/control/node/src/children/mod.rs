//! Starts, adopts, restarts and measures the child processes of a node.

pub mod adopt;
pub mod child;
pub mod held;
pub mod limits;
pub mod processes;
pub mod restart;
