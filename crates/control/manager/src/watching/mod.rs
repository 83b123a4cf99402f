//! Derives the overview, alarms and rates that people watch.

pub(crate) mod alarms;
pub mod overview;
pub(crate) mod own_metrics;
pub mod watch;
