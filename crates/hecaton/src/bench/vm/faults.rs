//! Compares a fault's cost in a guest with that in a program on the same host.

use super::{
    Bench,
    usage::{Totals, Usage},
};
use crate::bench::fault;
use crate::bench::machine::{Machine, Memory};
use crate::bench::measure::stats::Percentiles;
use crate::bench::measure::wire;
use crate::bench::program::guest::Request;
use crate::terminal::table::Table;
use hecaton_memory::pages_for_bytes;
use hecaton_pager::MIN_LOCAL_BYTES;
use serde::Serialize;

/// Costs of faults.
#[derive(Serialize)]
pub(super) struct Faults {
    /// First touches of pages at donors, in random order, while nothing is evicted.
    guest: Percentiles,
    /// The same touches while each one needs an eviction; half of the evicted pages are dirty.
    guest_evicting: Percentiles,
    /// Touches of resident pages: the cost of the guest's clock and of the loop.
    guest_again: Percentiles,
    /// Touches, and the pager's faults meanwhile; the guest's kernel causes some of the faults.
    guest_touches: u64,
    guest_pager_faults: u64,
    guest_evicting_touches: u64,
    guest_evicting_pager_faults: u64,
    /// A program's faults on the same cluster, nothing evicting, as in `bench fault`.
    program: Percentiles,
    /// Plain TCP round trips between the program's faults.
    tcp_rtt: Percentiles,
    /// Ratio of medians.
    guest_to_program: f64,
    moved: Usage,
}

pub(super) fn run(bench: &Bench<'_>) -> anyhow::Result<Faults> {
    let memory = bench.memory;
    let region = pages_for_bytes(memory / 4);
    let samples = region / 4 * 3;
    bench.say("faults: a guest comes up");
    let pool = Memory::Pool { cluster: bench.two_donors, local: memory };
    let mut machine = bench.start("faults", memory, pool)?;
    machine.wait_up()?;
    bench.say(&format!("faults: {samples} of a guest, nothing evicting"));
    fill_and_drive_out(&mut machine, region, memory)?;
    let before = Totals::now(bench.two_donors, &machine.name)?;
    let quiet = machine.touch(samples)?;
    let quiet_usage = Totals::now(bench.two_donors, &machine.name)?.since(&before);

    bench.say(&format!("faults: {samples} of a guest, while pages are evicted"));
    fill_and_drive_out(&mut machine, region, memory / 8)?;
    let before = Totals::now(bench.two_donors, &machine.name)?;
    let evicting = machine.touch(samples)?;
    let evicting_usage = Totals::now(bench.two_donors, &machine.name)?.since(&before);
    drop(machine);

    bench.say(&format!("faults: {samples} of a program, nothing evicting"));
    let program = fault::quiet(bench.two_donors, wire::serve()?, region, region / 4 * 3)?;
    Ok(Faults {
        guest_touches: quiet.again.count,
        guest_pager_faults: quiet_usage.faults,
        guest_evicting_touches: evicting.again.count,
        guest_evicting_pager_faults: evicting_usage.faults,
        guest_to_program: quiet.faulted.p50_us / program.fault.p50_us,
        guest: quiet.faulted,
        guest_evicting: evicting.faulted,
        guest_again: quiet.again,
        program: program.fault,
        tcp_rtt: program.tcp_rtt,
        moved: quiet_usage + evicting_usage,
    })
}

/// Has the guest fill a region, evicts nearly all its memory to donors, and sets its limit again.
pub(super) fn fill_and_drive_out(
    machine: &mut Machine<'_>,
    pages: u64,
    local: u64,
) -> anyhow::Result<()> {
    machine.perform(&Request::Fill { pages })?;
    machine.resize_local(MIN_LOCAL_BYTES)?;
    machine.resize_local(local)
}

pub(super) fn show(faults: &Faults) {
    println!("A fault, as the instruction that faults sees it");
    let mut table = Table::figures([
        "",
        "p50 µs",
        "p90 µs",
        "p99 µs",
        "max µs",
        "faults",
        "counted by the pager",
    ]);
    let mut row = |name: &str, of: &Percentiles, counted: Option<u64>| {
        let us = |value: f64| format!("{value:.1}");
        let faults = counted.map(|_| of.count.to_string()).unwrap_or_default();
        table.row([
            name.to_owned(),
            us(of.p50_us),
            us(of.p90_us),
            us(of.p99_us),
            us(of.max_us),
            faults,
            counted.map(|count| count.to_string()).unwrap_or_default(),
        ]);
    };
    row("of a guest, nothing evicting", &faults.guest, Some(faults.guest_pager_faults));
    let evicting = Some(faults.guest_evicting_pager_faults);
    row("of a guest, evicting", &faults.guest_evicting, evicting);
    row("  the same page again", &faults.guest_again, None);
    row("of a program, nothing evicting", &faults.program, None);
    row("  TCP round trip, as scheduled", &faults.tcp_rtt, None);
    print!("{table}");
    println!("  a guest's to a program's: {:.2} ×", faults.guest_to_program);
    println!("  {}", faults.moved);
}
