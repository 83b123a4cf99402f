//! Holds what every HTTP server of Hecaton has in common.

mod guard;
mod host;

pub use guard::guarded;
