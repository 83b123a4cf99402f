//! Donors that neither hear nor answer, though their connections stay open.

use hecaton_testkit::{patience, wait_for};
use hecaton_transport::fault::{Chaos, Plan};

/// Data in transit when the plan changes still passes: one byte.
pub(crate) fn to_be_silenced() -> Plan {
    Plan { grain_bytes: 1, ..Plan::default() }
}

/// From now on nothing that is sent either way arrives, and nobody is told.
pub(crate) fn silence(chaos: &Chaos) {
    chaos.set_plan(Plan { dropped: 1_000_000, ..Plan::default() });
    chaos.set_deaf(true);
}

pub(crate) fn end_silence(chaos: &Chaos) {
    chaos.set_plan(Plan::default());
    chaos.set_deaf(false);
    // Data sent on the connections is incomplete.
    chaos.cut_all();
}

/// Runs `work` to its end while the donor is silent, and then ends the silence.
///
/// # Panics
/// If `work` panics or waits for the donor.
pub(crate) fn end_silence_after(chaos: &Chaos, work: impl FnOnce() + Send) {
    let (ended, worked) = std::thread::scope(|scope| {
        let working = scope.spawn(work);
        let ended = wait_for("all requests end though a donor is silent", patience(), || {
            working.is_finished().then_some(()).ok_or("a request is not answered")
        });
        end_silence(chaos);
        (ended, working.join())
    });
    ended.unwrap();
    worked.unwrap();
}
