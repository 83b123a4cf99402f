//! A process that is the same one as before.
//!
//! A number alone names another process once its own has ended; with the moment of its start it
//! does not. A descriptor of the process would do without that, but cannot be handed to an agent
//! after a kill.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::fs;

/// The field of `/proc/PID/stat`, counted from the one after the name: the start, in ticks since
/// boot.
const STARTED: usize = 19;

/// A process, by its number and its start. It stays the same when it executes another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    pub(crate) pid: u32,
    started_ticks: u64,
}

impl ProcessId {
    /// The process that has this number now; none if it has ended.
    pub(crate) fn of(pid: u32) -> Option<ProcessId> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may contain anything.
        let mut fields = stat.rsplit(") ").next()?.split_whitespace();
        let state = fields.clone().next()?;
        let started_ticks = fields.nth(STARTED)?.parse().ok()?;
        // One that nobody has waited for yet has no memory any more.
        (!matches!(state, "Z" | "X")).then_some(ProcessId { pid, started_ticks })
    }

    /// When it was started, in ticks since boot.
    pub(crate) fn started(&self) -> u64 {
        self.started_ticks
    }

    /// Whether it runs.
    pub(crate) fn is_alive(&self) -> bool {
        ProcessId::of(self.pid) == Some(*self)
    }

    /// Kills it, and no other that has its number.
    pub(crate) fn kill(&self) {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return };
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        // From here on the descriptor refers to one process, even if that ends.
        if self.is_alive()
            && let Err(error) = pidfd_send_signal(process, Signal::KILL)
        {
            tracing::warn!(pid = self.pid, %error, "a machine cannot be killed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_testkit::wait_until;
    use std::process::Command;

    #[test]
    fn a_process_is_known_until_it_ends() {
        let mut child = Command::new("sleep").arg("600").spawn().expect("started");
        let process = ProcessId::of(child.id()).expect("it runs");
        assert!(process.is_alive());
        let other = ProcessId { started_ticks: process.started_ticks + 1, ..process };
        other.kill();
        assert!(!other.is_alive() && process.is_alive(), "another one of the same number");
        process.kill();
        // Also while nobody has waited for it.
        wait_until("the process has ended", || !process.is_alive());
        child.wait().expect("ended");
        assert!(!process.is_alive());
    }
}
