//! fio, the client of all servers of NBD alike.

use super::RAMP_S;
use crate::bench::world::process::{Guarded, require, tool};
use anyhow::{Context as _, ensure};
use serde::Deserialize;
use std::{
    io::Read as _,
    process::{Command, Stdio},
};

/// Access pattern and block size of a workload, and its requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Workload {
    pub(super) name: &'static str,
    /// As fio calls it.
    pattern: &'static str,
    pub(super) block_bytes: u64,
    pub(super) depth: u32,
}

const fn workload(
    name: &'static str,
    pattern: &'static str,
    block_bytes: u64,
    depth: u32,
) -> Workload {
    Workload { name, pattern, block_bytes, depth }
}

impl Workload {
    pub(super) const ALL: [Self; 6] = [
        workload("random reads, depth 1", "randread", 4 << 10, 1),
        workload("random writes, depth 1", "randwrite", 4 << 10, 1),
        workload("random reads, depth 32", "randread", 4 << 10, 32),
        workload("random writes, depth 32", "randwrite", 4 << 10, 32),
        workload("sequential reads, depth 8", "read", 128 << 10, 8),
        workload("sequential writes, depth 8", "write", 128 << 10, 8),
    ];

    pub(super) fn writes(&self) -> bool {
        self.pattern.ends_with("write")
    }

    pub(super) fn is_random(&self) -> bool {
        self.pattern.starts_with("rand")
    }
}

/// Result of one run, by fio or another client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measured {
    pub(super) per_s: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

/// Why fio cannot be the client here, if it cannot.
pub(super) fn require_fio() -> anyhow::Result<()> {
    require("fio", "fio").context("every server is measured by fio")?;
    let engines = tool("fio", &["--enghelp"])?;
    ensure!(
        engines.lines().any(|line| line.trim() == "nbd"),
        "this fio has no engine `nbd`; that of Debian's package fio, from version 11, has it"
    );
    Ok(())
}

/// Writes all of a device once, so that no read is of a hole.
pub(super) fn fill(uri: &str, bytes: u64) -> anyhow::Result<()> {
    let fill = workload("fill", "write", 1 << 20, 4);
    run(command(uri, &fill, bytes).arg(format!("--io_size={bytes}")), &fill).map(drop)
}

/// One workload for so many seconds, all over the first `bytes`.
pub(super) fn measure(
    uri: &str,
    workload: &Workload,
    bytes: u64,
    seconds: u32,
) -> anyhow::Result<Measured> {
    let mut fio = command(uri, workload, bytes);
    fio.arg("--time_based").arg(format!("--ramp_time={RAMP_S}"));
    run(fio.arg(format!("--runtime={seconds}")), workload)
}

fn command(uri: &str, workload: &Workload, bytes: u64) -> Command {
    let mut fio = Command::new("fio");
    fio.args(["--name=bench", "--ioengine=nbd", "--output-format=json"])
        // Every write carries new data that do not compress.
        .args(["--norandommap", "--randrepeat=0", "--refill_buffers", "--percentile_list=50:99"])
        .arg(format!("--rw={}", workload.pattern))
        .arg(format!("--bs={}", workload.block_bytes))
        .arg(format!("--iodepth={}", workload.depth))
        .arg(format!("--size={bytes}"))
        .arg(format!("--uri={uri}"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    fio
}

fn run(command: &mut Command, workload: &Workload) -> anyhow::Result<Measured> {
    let mut fio = Guarded::spawn(command)?;
    let mut said = String::new();
    fio.output()?.read_to_string(&mut said).context("what fio said cannot be read")?;
    fio.finish()?;
    measured(&said, workload.writes())
}

/// The part of fio's report that is used.
#[derive(Deserialize)]
struct Report {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i64,
    read: Side,
    write: Side,
}

#[derive(Deserialize)]
struct Side {
    iops: f64,
    clat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    #[serde(default)]
    percentile: std::collections::BTreeMap<String, f64>,
}

fn measured(said: &str, writes: bool) -> anyhow::Result<Measured> {
    // Warnings stand before it.
    let json = said.find('{').map_or("", |start| &said[start..]);
    let report: Report = serde_json::from_str(json).context("fio's report is not understood")?;
    let job = report.jobs.into_iter().next().context("fio reports of no job")?;
    ensure!(job.error == 0, "fio failed with error {}", job.error);
    let side = if writes { job.write } else { job.read };
    let at = |percentile: &str| {
        let ns = side.clat_ns.percentile.get(percentile).copied();
        ns.map(|ns| ns / 1e3).context("fio reports no latencies")
    };
    Ok(Measured { per_s: side.iops, p50_us: at("50.000000")?, p99_us: at("99.000000")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_understood_and_a_failure_is_one() {
        let report = |error: i64| {
            format!(
                "a warning\n{{\"jobs\":[{{\"error\":{error},\"read\":{{\"iops\":2.5,\"clat_ns\":\
                 {{\"percentile\":{{\"50.000000\":1500,\"99.000000\":9000}}}}}},\
                 \"write\":{{\"iops\":0,\"clat_ns\":{{}}}}}}]}}"
            )
        };
        let expected = Measured { per_s: 2.5, p50_us: 1.5, p99_us: 9.0 };
        assert_eq!(measured(&report(0), false).unwrap(), expected);
        assert!(measured(&report(0), true).unwrap_err().to_string().contains("no latencies"));
        assert!(measured(&report(5), false).unwrap_err().to_string().contains("error 5"));
        assert!(measured("nothing", false).is_err());
    }
}
