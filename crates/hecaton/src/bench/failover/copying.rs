//! How fast copies are made between donors: anew after a loss, or elsewhere when a donor drains;
//! and what that costs the faults of the program whose pages they are.

use super::{Site, steady::Steady};
use crate::bench::world::interrupt;
use crate::bench::world::process::Guarded;
use anyhow::{Context as _, ensure};
use hecaton_memory::Size;
use serde::Serialize;
use std::{
    process::Stdio,
    time::{Duration, Instant},
};

/// Between two looks.
const TICK: Duration = Duration::from_millis(10);

/// How long a loss may take to be noticed: a donor that nobody needs is asked every three seconds.
const NOTICED: Duration = Duration::from_secs(30);

/// As long as copying takes at least, for faults to be compared with.
const QUIET: Duration = Duration::from_secs(2);

/// With one limit.
#[derive(Serialize)]
pub(super) struct AtLimit {
    /// Limit of copying, in GB/s.
    pub(super) limit_gbps: f64,
    pub(super) rebuild: Option<Copying>,
    pub(super) drain: Copying,
}

/// One of them.
#[derive(Serialize)]
pub(super) struct Copying {
    pub(super) bytes: u64,
    pub(super) gbps: f64,
    /// Against one TCP stream between the same hosts.
    pub(super) to_tcp: f64,
    pub(super) aim_to_tcp: f64,
    pub(super) fault_p50_us: f64,
    pub(super) fault_p99_us: f64,
    pub(super) quiet_fault_p50_us: f64,
    pub(super) quiet_fault_p99_us: f64,
    /// Ratio of the medians.
    pub(super) fault_ratio: f64,
    pub(super) aim_fault_ratio: f64,
}

/// A donor drains, and one is lost with its memory where there are hosts that can be lost, while
/// copying for the program is limited so.
pub(super) fn at_limit(
    site: &mut Site,
    (pages, limit): (u64, Size),
    tcp_gbps: f64,
) -> anyhow::Result<AtLimit> {
    let mut program = Steady::start(&site.cluster, pages, limit)?;
    let drain = drain(site, &mut program, tcp_gbps)?;
    let rebuild =
        site.hosts.is_some().then(|| rebuild(site, &mut program, tcp_gbps)).transpose()?;
    program.end()?;
    Ok(AtLimit { limit_gbps: limit.0 as f64 / 1e9, rebuild, drain })
}

/// A donor ends, and its memory with it.
fn rebuild(site: &mut Site, program: &mut Steady, tcp_gbps: f64) -> anyhow::Result<Copying> {
    let donor = site.donors()?.into_iter().next().context("there is no donor")?;
    let hosts = site.hosts.as_mut().context("there are no hosts that can be lost")?;
    let host = hosts.host_named(&donor.name)?;
    let measured = measure(program, tcp_gbps, || hosts.kill_lender(host, donor.pid))?;
    hosts.restart_lender(&site.cluster, host)?;
    Ok(measured)
}

/// A donor drains.
fn drain(site: &Site, program: &mut Steady, tcp_gbps: f64) -> anyhow::Result<Copying> {
    let donor = site.donors()?.into_iter().next_back().context("there is no donor")?;
    let drain = || {
        let mut command = site.cluster.command("node");
        command.args(["drain", &donor.name]).stdin(Stdio::null()).stdout(Stdio::null());
        command
    };
    let mut draining = None;
    let measured = measure(program, tcp_gbps, || {
        draining = Some(Guarded::spawn(&mut drain())?);
        Ok(())
    });
    if let Some(draining) = &mut draining {
        draining.finish()?;
    }
    Guarded::spawn(drain().arg("--cancel"))?.finish()?;
    measured
}

/// From the first copy to the last.
fn measure(
    program: &mut Steady,
    tcp_gbps: f64,
    begin: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Copying> {
    program.window()?;
    std::thread::sleep(QUIET);
    let quiet = program.window()?.faults;
    let before = program.pool()?.copied_bytes;
    begin()?;
    let asked = Instant::now();
    let mut since = asked;
    let mut copied = before;
    while copied == before {
        interrupt::check()?;
        ensure!(asked.elapsed() < NOTICED, "no copy is made after {NOTICED:?}");
        std::thread::sleep(TICK);
        since = Instant::now();
        copied = program.pool()?.copied_bytes;
    }
    program.window()?;
    let (first, mut until) = (copied, since);
    loop {
        interrupt::check()?;
        std::thread::sleep(TICK);
        let (now, pool) = (Instant::now(), program.pool()?);
        if pool.copied_bytes > copied {
            (copied, until) = (pool.copied_bytes, now);
        }
        if pool.degraded_bytes == 0 && pool.to_move_bytes == 0 {
            break;
        }
    }
    let during = program.window()?.faults;
    let seconds = (until - since).as_secs_f64();
    ensure!(seconds > 0.0, "too little was copied to be measured; give more --size");
    let gbps = (copied - first) as f64 / seconds / 1e9;
    Ok(Copying {
        bytes: copied - before,
        gbps,
        to_tcp: gbps / tcp_gbps,
        aim_to_tcp: 0.8,
        fault_p50_us: during.p50_us,
        fault_p99_us: during.p99_us,
        quiet_fault_p50_us: quiet.p50_us,
        quiet_fault_p99_us: quiet.p99_us,
        fault_ratio: during.p50_us / quiet.p50_us,
        aim_fault_ratio: 1.5,
    })
}
