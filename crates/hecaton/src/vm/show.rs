//! `hecaton vm list` and `hecaton vm status`.

use crate::cluster::{ClusterArgs, ListArgs};
use crate::terminal::table::Table;
use anyhow::bail;
use hecaton_memory::Size;
use hecaton_node::cluster::report::NodeReport;
use hecaton_node::pagers::ConsumerReport;
use hecaton_node::vms::{VmReport, VmState};
use hecaton_pager::PoolUse;
use hecaton_pager::placement::ScrubUse;
use serde::Serialize;
use std::fmt::Write as _;
use std::process::ExitCode;

/// Arguments of `hecaton vm status`.
#[derive(clap::Args)]
pub(crate) struct StatusArgs {
    /// The machine
    name: String,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// A machine with what its pager has counted.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    vm: &'a VmReport,
    /// Its pager.
    pager: Option<&'a ConsumerReport>,
}

impl<'a> Shown<'a> {
    fn new(report: &'a NodeReport, vm: &'a VmReport) -> Shown<'a> {
        let pager = report.consumers.iter().find(|consumer| consumer.name == vm.name);
        Shown { vm, pager }
    }
}

pub(crate) fn list(args: &ListArgs) -> anyhow::Result<ExitCode> {
    let report = args.cluster.need_local_node()?.status()?;
    let shown: Vec<_> = report.vms.iter().map(|vm| Shown::new(&report, vm)).collect();
    if args.json {
        println!("{}", serde_json::to_string(&shown)?);
    } else {
        print!("{}", table(&shown));
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn status(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let report = args.cluster.need_local_node()?.status()?;
    let Some(vm) = report.vms.iter().find(|vm| vm.name == args.name) else {
        bail!(
            "this host has no virtual machine `{}`; `hecaton vm list` names those it has",
            args.name
        );
    };
    let shown = Shown::new(&report, vm);
    if args.json {
        println!("{}", serde_json::to_string(&shown)?);
    } else {
        print!("{}", describe(&shown));
    }
    Ok(ExitCode::SUCCESS)
}

fn table(shown: &[Shown<'_>]) -> String {
    let mut table = Table::new([
        "NAME",
        "STATE",
        ">PID",
        ">MEMORY",
        ">LOCAL",
        ">LIMIT",
        ">POOL",
        ">FAULTS",
        ">P50",
        ">P99",
        ">RESTARTS",
    ]);
    for machine in shown {
        let stats = machine.pager.and_then(|pager| pager.stats.as_ref());
        let latency = stats.map(|stats| &stats.pool_fault_latency).filter(|all| all.count > 0);
        let restarts = machine.pager.map(|pager| pager.restarts).unwrap_or_default();
        table.row([
            machine.vm.name.clone(),
            state(machine.vm.state).to_owned(),
            machine.vm.pid.map_or_else(dash, |pid| pid.to_string()),
            machine.vm.memory_bytes.map_or_else(dash, size),
            stats.map_or_else(dash, |stats| size(stats.local_bytes)),
            machine.pager.map_or_else(dash, |pager| size(pager.local_bytes)),
            stats.map_or_else(dash, |stats| size(stats.pool_bytes)),
            stats.map_or_else(dash, |stats| stats.faults.to_string()),
            latency.map_or_else(dash, |latency| format!("{:.1}", latency.p50_us)),
            latency.map_or_else(dash, |latency| format!("{:.1}", latency.p99_us)),
            (restarts + stats.map_or(0, |stats| stats.restarts)).to_string(),
        ]);
    }
    let mut text = table.to_string();
    if !shown.is_empty() {
        text += "P50, P99: microseconds from a fault to its page from the pool.\n";
    }
    for machine in shown {
        if let Some(reason) = &machine.vm.reason {
            let _ = writeln!(text, "{}: {reason}", machine.vm.name);
        }
    }
    text
}

fn describe(machine: &Shown<'_>) -> String {
    let mut text = table(std::slice::from_ref(machine));
    if let Some(monitor) = &machine.vm.monitor {
        let _ = writeln!(text, "monitor: {}", monitor.display());
    }
    if let Some(stats) = machine.pager.and_then(|pager| pager.stats.as_ref()) {
        text += &pool(&stats.pool);
        if stats.encrypted {
            text += "encrypted: donors have ciphertext only\n";
        }
    }
    text
}

/// Lists the donors that back the machine, and the copies that are still to be made.
fn pool(pool: &PoolUse) -> String {
    let mut text = String::new();
    let donors = |held: &mut dyn Iterator<Item = (&String, u64)>| {
        let held: Vec<String> =
            held.map(|(name, bytes)| format!("{name} ({})", size(bytes))).collect();
        if held.is_empty() { "nobody yet".to_owned() } else { held.join(", ") }
    };
    let held = donors(&mut pool.donors.iter().map(|donor| (&donor.name, donor.bytes)));
    let _ = writeln!(
        text,
        "pool: {} in extents, copies of each page: {}; {held}",
        size(pool.extents_bytes),
        pool.copies
    );
    if !pool.only_donors.is_empty() {
        let _ = writeln!(text, "only donors: {}", pool.only_donors.join(", "));
    }
    for range in &pool.ranges {
        let held = donors(&mut range.held_by.iter().map(|(name, bytes)| (name, *bytes)));
        let (from, to, named) = (size(range.start), size(range.end), range.donors.join(", "));
        let _ = writeln!(text, "RAM {from}-{to}: for {named}; with {held}");
    }
    if pool.to_move_bytes > 0 {
        let (degraded, left) = (size(pool.degraded_bytes), size(pool.to_move_bytes));
        let _ = writeln!(text, "to be copied or moved: {left}, of which {degraded} lacks a copy");
    }
    if pool.lost_bytes > 0 {
        let _ = writeln!(text, "lost: {}", size(pool.lost_bytes));
    }
    if let Some(code) = pool.code.filter(|_| pool.coded_bytes > 0) {
        let (coded, saved) = (size(pool.coded_bytes), size(pool.saved_bytes));
        let _ = writeln!(text, "cold: {coded} in code {code}; {saved} saved");
    }
    if pool.scrub.verified_bytes > 0 {
        let ScrubUse { rounds, repaired_pages, copies_given_up, lost_pages, .. } = pool.scrub;
        let _ = writeln!(
            text,
            "copies compared {rounds} times: {repaired_pages} pages repaired, {copies_given_up} \
             copies made anew, {lost_pages} pages damaged in every copy"
        );
    }
    text
}

fn state(state: VmState) -> &'static str {
    match state {
        VmState::Waiting => "waiting",
        VmState::Running => "running",
        VmState::Paused => "paused",
        VmState::Stopped => "stopped",
        VmState::Leaving => "leaving",
        VmState::Detached => "detached",
        VmState::Stuck => "stuck",
    }
}

fn size(bytes: u64) -> String {
    Size(bytes).to_string()
}

fn dash() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_pager::placement::{DonorUse, RangeUse};

    fn vm(state: VmState, reason: Option<&str>) -> VmReport {
        VmReport {
            name: "db".to_owned(),
            state,
            run_state: None,
            reason: reason.map(str::to_owned),
            pid: Some(7),
            memory_bytes: Some(4 << 30),
            monitor: Some("/run/vm-db.qmp".into()),
        }
    }

    #[test]
    fn a_machine_is_one_row_and_its_reason_a_line() {
        let vm = vm(VmState::Stopped, Some("segment 3 is lost with donor a"));
        let shown = [Shown { vm: &vm, pager: None }];
        let text = table(&shown);
        let row = text.lines().find(|line| line.starts_with("db ")).expect("a row");
        let cells: Vec<_> = row.split_whitespace().collect();
        assert_eq!(cells, ["db", "stopped", "7", "4G", "-", "-", "-", "-", "-", "-", "0"]);
        assert!(text.contains("db: segment 3 is lost"), "{text}");
    }

    #[test]
    fn who_backs_what_is_told() {
        let bytes = 1 << 30;
        let held_by = [("a".to_owned(), bytes)].into();
        let range = RangeUse { start: 0, end: 2 * bytes, donors: vec!["b".into()], held_by };
        let donor = DonorUse { name: "a".into(), bytes, ..DonorUse::default() };
        let no_scrub = ScrubUse::default();
        let shown = pool(&PoolUse {
            copies: 2,
            extents_bytes: bytes,
            to_move_bytes: bytes,
            donors: vec![donor],
            ranges: vec![range],
            scrub: ScrubUse { rounds: 4, verified_bytes: bytes, repaired_pages: 2, ..no_scrub },
            ..PoolUse::default()
        });
        assert!(shown.contains("pool: 1G in extents, copies of each page: 2; a (1G)"), "{shown}");
        assert!(shown.contains("RAM 0-2G: for b; with a (1G)"), "{shown}");
        assert!(shown.contains("to be copied or moved: 1G"), "{shown}");
        assert!(shown.contains("copies compared 4 times: 2 pages repaired, 0 copies"), "{shown}");
        let shown = pool(&PoolUse::default());
        assert!(shown.contains("nobody yet") && !shown.contains("compared"), "{shown}");
    }

    #[test]
    fn encryption_is_told() {
        let vm = vm(VmState::Running, None);
        for encrypted in [false, true] {
            let pager = ConsumerReport {
                name: "db".to_owned(),
                state: hecaton_node::pagers::PagerState::Serving,
                local_bytes: 1 << 30,
                stats: Some(hecaton_pager::Stats { encrypted, ..Default::default() }),
                ..ConsumerReport::default()
            };
            let text = describe(&Shown { vm: &vm, pager: Some(&pager) });
            assert_eq!(text.contains("donors have ciphertext only"), encrypted, "{text}");
        }
    }

    #[test]
    fn a_monitor_is_named() {
        let vm = vm(VmState::Running, None);
        let text = describe(&Shown { vm: &vm, pager: None });
        assert!(text.contains("monitor: /run/vm-db.qmp"), "{text}");
    }
}
