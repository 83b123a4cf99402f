//! A Redis server under redis-benchmark: random accesses to small objects.
//!
//! redis-benchmark itself writes one and the same value to every key, which any compressing peer
//! would make vanish. The keys are therefore filled with values of their own beforehand, under the
//! names that redis-benchmark asks for, and the benchmark reads them. A sample is compared at the
//! end.

use super::{
    program::{Finished, Outcome, Program, failure},
    setup::Setup,
    swap::free_port,
};
use crate::bench::measure::redis_client::{Client, KEY_BYTES, SAMPLES};
use crate::bench::world::process::{Guarded, describe, eventually, require};
use anyhow::ensure;
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// Reads for each key.
const REQUESTS_PER_KEY: u64 = 1;

pub(super) struct Redis {
    keys: u64,
    dir: PathBuf,
}

impl Redis {
    pub(super) fn new(bytes: u64, dir: &Path) -> anyhow::Result<Self> {
        require("redis-server", "redis-server")?;
        require("redis-benchmark", "redis-tools")?;
        let keys = (bytes / KEY_BYTES).max(SAMPLES);
        Ok(Self { keys, dir: dir.to_owned() })
    }

    fn start(&self, setup: &Setup<'_>, port: u16) -> anyhow::Result<Guarded> {
        let mut command = setup.command("redis-server");
        command
            .args(["--bind", "127.0.0.1", "--port", &port.to_string()])
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(&self.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        Guarded::spawn(&mut command)
    }

    fn benchmark(&self, port: u16) -> Command {
        let mut command = Command::new("redis-benchmark");
        command
            .args(["-q", "-h", "127.0.0.1", "-p", &port.to_string(), "-t", "get", "-c", "16"])
            .args(["-n", &(self.keys * REQUESTS_PER_KEY).to_string()])
            .args(["-r", &self.keys.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    }
}

impl Program for Redis {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn run(&self, setup: &Setup<'_>, limit: Duration) -> anyhow::Result<Outcome> {
        let deadline = Instant::now() + limit;
        let port = free_port()?;
        let mut server = self.start(setup, port)?;
        let client = eventually(Duration::from_secs(20), || match server.exit_status()? {
            Some(status) => Ok(Err(status)),
            None => Client::connect(port).map(Ok),
        })?;
        let measured = match client {
            Ok(client) => self.measure(client, &mut server, port, deadline),
            Err(status) => Err(anyhow::anyhow!("redis-server {}", describe(status))),
        };
        // A server that is killed takes its clients' connections along; its own end tells more.
        if measured.is_err()
            && let Some(status) = server.exit_status()?
            && let Some(outcome) = failure("redis-server", status)?
        {
            return Ok(outcome);
        }
        measured
    }
}

impl Redis {
    fn measure(
        &self,
        mut client: Client,
        server: &mut Guarded,
        port: u16,
        deadline: Instant,
    ) -> anyhow::Result<Outcome> {
        if !client.fill(self.keys, deadline)? {
            return Ok(Outcome::TooSlow);
        }
        let start = Instant::now();
        let mut benchmark = Guarded::spawn(&mut self.benchmark(port))?;
        let Some(status) = benchmark.wait_until(deadline)? else { return Ok(Outcome::TooSlow) };
        let elapsed = start.elapsed();
        ensure!(status.success(), "redis-benchmark {}", describe(status));

        client.compare(self.keys)?;
        let peak_bytes = server.peak_bytes();
        client.send(&[b"SHUTDOWN", b"NOSAVE"])?;
        server.wait_until(deadline)?;
        Ok(Outcome::Finished(Finished { elapsed, peak_bytes, fairness: None }))
    }
}
