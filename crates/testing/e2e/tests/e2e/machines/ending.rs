//! Stock QEMU as it ends.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, PATIENCE},
    guest::{Guests, Machine, Spec, report},
    process::signal,
};
use anyhow::ensure;
use rustix::process::Signal;
use std::thread;

/// A QEMU whose monitor is asked something at the moment at which it ends hangs now and then, or
/// crashes. The node, which asks on and on, notices that it hangs, and helps it.
pub(crate) fn while_it_is_asked(cluster: &Cluster, guests: &Guests) -> TestResult {
    let spec = Spec { arguments: &["-S"], ..Spec::default() };
    for _ in 0..8 {
        let mut machine = Machine::start(cluster, guests, &spec)?;
        let mut monitor = machine.monitor()?;
        let asking = thread::spawn(move || while monitor.status(PATIENCE).is_ok() {});
        cluster.eventually("the node has asked, too", PATIENCE, |_| {
            Ok(report(cluster, "guest")?["run_state"] == "prelaunch")
        })?;
        signal(machine.id(), Signal::TERM);
        machine.end_of_any_kind()?;
        ensure!(asking.join().is_ok(), "the monitor was not asked to the end");
    }
    Ok(Outcome::Passed)
}
