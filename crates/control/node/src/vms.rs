//! The virtual machines whose memory this node's pagers serve.
//!
//! A machine is followed by one thread from the moment its pager listens until its pager has ended.
//! The thread talks to QEMU's monitor, and to nobody else: it is on no path of a page, and when it
//! or the node dies the machine goes on. The next node follows it again: what it must know for
//! that, the pager has kept.
//!
//! When pages are lost beyond repair the pager says so in its statistics and leaves the faults on
//! those pages unanswered. The machine is then stopped through its monitor, with the reason in its
//! report, and stays so until somebody ends it. A processor that waits for a lost page cannot be
//! stopped; QEMU then does not answer, and that is said too. In no case does the guest read
//! anything else than what it wrote.

use crate::pagers::{LeftVm, PagerError, Pagers};
use crate::socket::message::StartVm;
use crate::stop::Stop;
use hecaton_pager::Stats;
use hecaton_vm::qmp::{Monitor, RunState};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// How often a machine is looked at.
const INTERVAL: Duration = Duration::from_millis(250);

/// How long what was plugged into it may go unnoticed. QEMU has no event for a device that is added
/// (`DEVICE_DELETED` has no counterpart), so it must be asked; a second costs its main loop five
/// short commands each.
const INSPECTION_INTERVAL: Duration = Duration::from_secs(1);

/// How long a monitor may take to answer. QEMU's main loop is busy for as long as a page takes
/// that it waits for itself.
const PATIENCE: Duration = Duration::from_secs(5);

/// State of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// It has handed no memory over yet.
    Waiting,
    /// It runs; or its monitor is not known, and it has handed its memory over.
    Running,
    /// Its processors are stopped: by somebody else than this node, or because it has ended or is
    /// suspended.
    Paused,
    /// This node has stopped it; the report says why.
    Stopped,
    /// Its memory is being brought home.
    Leaving,
    /// Its memory is its host's again, and is paged no longer. It runs on.
    Detached,
    /// It should be stopped, and its monitor does not answer: a processor waits for a page that is
    /// lost.
    Stuck,
}

impl VmState {
    /// That of a machine that was seen to run, or not. It may have been told to leave since
    /// somebody began to look.
    fn seen(self, running: bool) -> VmState {
        match (self, running) {
            (VmState::Leaving | VmState::Detached, _) => self,
            (_, true) => VmState::Running,
            (VmState::Stopped, false) => VmState::Stopped,
            (_, false) => VmState::Paused,
        }
    }
}

/// A virtual machine, as the node reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmReport {
    /// Its name, which is its consumer's too.
    pub name: String,
    /// Its state.
    pub state: VmState,
    /// QEMU's word for it (`running`, `paused`, `suspended`, …), once the monitor has answered.
    pub run_state: Option<String>,
    /// Why it was stopped.
    pub reason: Option<String>,
    /// Its process, once the monitor has answered.
    pub pid: Option<u32>,
    /// The guest's RAM, plugged memory included, once the monitor has answered.
    pub memory_bytes: Option<u64>,
    /// Where its monitor listens.
    pub monitor: Option<PathBuf>,
}

/// All virtual machines of a node.
#[derive(Clone, Debug)]
pub struct Vms(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    pagers: Pagers,
    table: Mutex<Table>,
    stop: Stop,
}

#[derive(Debug, Default)]
struct Table {
    entered: u64,
    machines: BTreeMap<String, Machine>,
}

#[derive(Debug)]
struct Machine {
    /// Which machine of this name it is: one that has just ended may still be followed when the
    /// next is entered.
    number: u64,
    report: VmReport,
    /// A node before this one has followed it.
    was_left: bool,
}

impl Vms {
    /// None yet.
    pub fn new(pagers: Pagers) -> Vms {
        Vms(Arc::new(Shared { pagers, table: Mutex::default(), stop: Stop::default() }))
    }

    /// Enters a machine whose pager is about to be started, and returns its number.
    pub(crate) fn enter(&self, wish: &StartVm) -> Result<u64, PagerError> {
        let mut table = self.table();
        let known = table.machines.contains_key(&wish.name);
        if known && self.0.pagers.report(&wish.name).is_ok() {
            return Err(PagerError::NameTaken(wish.name.clone()));
        }
        Ok(table.enter(wish.name.clone(), wish.monitor.clone(), VmState::Waiting, false))
    }

    /// Follows a machine whose pager was taken over.
    pub(crate) fn adopt(&self, left: LeftVm) {
        let LeftVm { name, monitor, leaving } = left;
        let state = if leaving { VmState::Leaving } else { VmState::Waiting };
        let number = self.table().enter(name.clone(), monitor, state, true);
        self.follow(&name, number);
    }

    /// Follows a machine whose pager listens, until the pager has ended.
    pub(crate) fn follow(&self, name: &str, number: u64) {
        let follower = {
            let (vms, name) = (self.clone(), name.to_owned());
            move || {
                Follower::new(vms.clone(), name.clone(), number).run();
                vms.forget(&name, number);
            }
        };
        if let Err(error) = thread::Builder::new().name("vm".into()).spawn(follower) {
            tracing::error!(vm = name, %error, "the machine cannot be followed");
            self.forget(name, number);
        }
    }

    /// Forgets a machine, and what its monitor has left.
    pub(crate) fn forget(&self, name: &str, number: u64) {
        let mut table = self.table();
        if table.machines.get(name).is_none_or(|machine| machine.number != number) {
            return;
        }
        let machine = table.machines.remove(name);
        if let Some(monitor) = machine.and_then(|machine| machine.report.monitor) {
            // QEMU removes it itself, unless it was killed. With the table locked, so that it is
            // not the next machine's.
            match std::fs::remove_file(&monitor) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(vm = name, %error, "the monitor's socket cannot be removed");
                }
                _ => {}
            }
        }
    }

    /// All machines as they are now.
    pub fn reports(&self) -> Vec<VmReport> {
        self.table().machines.values().map(|machine| machine.report.clone()).collect()
    }

    /// A machine's memory is being brought home.
    pub(crate) fn leaves(&self, name: &str) {
        if let Some(machine) = self.table().machines.get_mut(name) {
            machine.report.state = VmState::Leaving;
        }
    }

    /// Ends the followers.
    pub(crate) fn stop(&self) {
        self.0.stop.set();
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().expect("no thread panics with the table")
    }
}

impl Table {
    fn enter(
        &mut self,
        name: String,
        monitor: Option<PathBuf>,
        state: VmState,
        was_left: bool,
    ) -> u64 {
        let report = VmReport {
            name: name.clone(),
            state,
            run_state: None,
            reason: None,
            pid: None,
            memory_bytes: None,
            monitor,
        };
        self.entered += 1;
        let number = self.entered;
        self.machines.insert(name, Machine { number, report, was_left });
        number
    }
}

/// The thread that follows one machine.
struct Follower {
    vms: Vms,
    name: String,
    number: u64,
    monitor: Option<Monitor>,
    inspected: Option<Instant>,
    /// Reasons for which it was stopped. Each stops it once, so that an operator can resume it.
    stopped_for: Vec<String>,
}

impl Follower {
    fn new(vms: Vms, name: String, number: u64) -> Follower {
        Follower { vms, name, number, monitor: None, inspected: None, stopped_for: Vec::new() }
    }

    /// The machine's report; none if the next of its name has taken its place.
    fn report<T>(&self, look: impl FnOnce(&mut VmReport) -> T) -> Option<T> {
        let mut table = self.vms.table();
        let machine = table.machines.get_mut(&self.name);
        machine
            .filter(|machine| machine.number == self.number)
            .map(|machine| look(&mut machine.report))
    }

    fn run(mut self) {
        while !self.vms.0.stop.wait(INTERVAL) {
            let Ok(consumer) = self.vms.0.pagers.report(&self.name) else { return };
            let Some(state) = self.report(|report| report.state) else { return };
            let lost = consumer.stats.as_ref().and_then(|stats| stats.error.clone());
            match state {
                // Its devices and lost pages do not matter any more.
                VmState::Detached => continue,
                VmState::Leaving => {
                    let left = consumer.stats.as_ref().is_some_and(|stats| stats.processes == 0);
                    if left {
                        self.set_state(VmState::Detached);
                        continue;
                    }
                    if lost.is_none() {
                        continue;
                    }
                }
                _ => {}
            }
            if self.monitor.is_none() {
                self.connect();
            }
            if let Some(reason) = lost {
                self.halt(reason);
            } else if self.monitor.is_some() {
                self.look();
                if self.monitor.is_some() && self.left_before(consumer.stats.as_ref()) {
                    self.set_state(VmState::Detached);
                }
            } else if consumer.stats.as_ref().is_some_and(|stats| stats.local_bytes > 0) {
                self.report(|report| report.state = report.state.seen(true));
            }
        }
    }

    /// Whether a machine that runs had left the pool before this node came to follow it.
    fn left_before(&self, stats: Option<&Stats>) -> bool {
        let table = self.vms.table();
        let was_left = table.machines.get(&self.name).is_some_and(|machine| machine.was_left);
        was_left && stats.is_some_and(|stats| stats.processes == 0 && stats.local_peak_bytes > 0)
    }

    fn connect(&mut self) {
        let path = self.report(|report| report.monitor.clone()).flatten();
        let Some(path) = path.filter(|path| path.exists()) else { return };
        match Monitor::connect(&path, PATIENCE) {
            Ok(monitor) => {
                let pid = monitor.peer_pid();
                self.report(|report| report.pid = pid);
                self.monitor = Some(monitor);
            }
            // Not listening yet, or no longer.
            Err(error) => tracing::debug!(vm = self.name, %error, "no monitor yet"),
        }
    }

    /// Asks the machine how it is.
    fn look(&mut self) {
        let Some(monitor) = &mut self.monitor else { return };
        let state = match monitor.status(PATIENCE) {
            Ok(state) => state,
            Err(error) => {
                // It has ended, or is ending: the pager's end tells.
                tracing::debug!(vm = self.name, %error, "the monitor does not answer");
                self.monitor = None;
                return;
            }
        };
        while let Ok(Some(event)) = monitor.next_event(Duration::ZERO) {
            tracing::debug!(vm = self.name, event = event.name, data = %event.data, "event");
            // Whatever happened may have to do with a change of the machine: plugged memory that
            // its guest has taken up, a medium, somebody who let it go on.
            self.inspected = None;
        }
        let inspected = self.inspected.is_some_and(|at| at.elapsed() < INSPECTION_INTERVAL);
        let found = (!inspected).then(|| {
            self.inspected = Some(Instant::now());
            (monitor.memory_size(PATIENCE), monitor.refusals(PATIENCE))
        });
        self.note(&state);
        let Some((size, refused)) = found else { return };
        if let Ok(size) = size {
            let bytes = size.base_bytes + size.plugged_bytes;
            self.report(|report| report.memory_bytes = Some(bytes));
        }
        match refused {
            Ok(refused) if !refused.is_empty() => {
                let reasons: Vec<_> = refused.iter().map(ToString::to_string).collect();
                self.halt(reasons.join("; "));
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(vm = self.name, %error, "cannot be inspected"),
        }
    }

    /// Stops the machine, once for each reason. One whose monitor does not answer is stuck, and to
    /// be stopped as soon as it does: this is called again while the reason lasts.
    fn halt(&mut self, reason: String) {
        if self.stopped_for.contains(&reason) {
            return;
        }
        let is_new = self.report(|report| report.reason.as_ref() != Some(&reason)) == Some(true);
        if is_new {
            tracing::error!(vm = self.name, reason, "stopping the virtual machine");
        }
        let state = match self.monitor.as_mut().map(|monitor| monitor.stop(PATIENCE)) {
            Some(Ok(())) => {
                self.stopped_for.push(reason.clone());
                VmState::Stopped
            }
            Some(Err(error)) => {
                if is_new {
                    tracing::error!(vm = self.name, %error, "the virtual machine is not stopped");
                }
                self.monitor = None;
                VmState::Stuck
            }
            None => VmState::Stuck,
        };
        self.report(|report| {
            report.state = state;
            report.reason = Some(reason);
        });
    }

    fn note(&self, state: &RunState) {
        self.report(|report| {
            report.run_state = Some(state.status.clone());
            report.state = report.state.seen(state.running);
        });
    }

    fn set_state(&self, state: VmState) {
        self.report(|report| report.state = state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It is told to while its monitor is asked.
    #[test]
    fn a_machine_that_leaves_is_not_taken_for_one_that_runs() {
        for left in [VmState::Leaving, VmState::Detached] {
            assert_eq!([true, false].map(|running| left.seen(running)), [left, left]);
        }
        let seen = |known: VmState| [true, false].map(|running| known.seen(running));
        assert_eq!(seen(VmState::Stopped), [VmState::Running, VmState::Stopped]);
        for known in [VmState::Waiting, VmState::Running, VmState::Paused, VmState::Stuck] {
            assert_eq!(seen(known), [VmState::Running, VmState::Paused]);
        }
    }
}
