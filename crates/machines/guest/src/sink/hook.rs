//! A command of the user's, run once for each order.

use super::program::run;
use super::{Ending, Progress, Sink, SinkError};
use crate::governor::{Order, Reason};
use std::process::Command;
use std::time::Duration;

/// A command.
pub(crate) struct Hook {
    pub(crate) application: String,
    /// The program and its arguments; one at least.
    pub(crate) command: Vec<String>,
    /// How long it may run.
    pub(crate) timeout: Duration,
    pub(crate) ending: Ending,
}

impl Sink for Hook {
    fn tell(&mut self, order: &Order) -> Result<Progress, SinkError> {
        let reason = match order.reason {
            Reason::Start => "start",
            Reason::Shrink => "shrink",
            Reason::Grow => "grow",
            Reason::Eviction => "eviction",
            Reason::Spared => "spared",
        };
        let mut command = Command::new(&self.command[0]);
        command
            .args(&self.command[1..])
            .env("HECATON_APPLICATION", &self.application)
            .env("HECATON_REASON", reason)
            .env("HECATON_LIMIT_BYTES", order.limit_bytes.to_string())
            .env("HECATON_TARGET_BYTES", order.total_bytes.to_string())
            .env("HECATON_DEADLINE_MS", order.within.as_millis().to_string());
        run(&mut command, self.timeout, &self.ending)?;
        Ok(Progress::Settled)
    }

    fn keep(&mut self, _: &Order) -> Result<(), SinkError> {
        Ok(())
    }
}
