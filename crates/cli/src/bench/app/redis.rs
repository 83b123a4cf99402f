//! A Redis server under redis-benchmark: random accesses to small objects.
//!
//! redis-benchmark itself writes one and the same value to every key, which any compressing peer
//! would make vanish. The keys are therefore filled with values of their own beforehand, under the
//! names that redis-benchmark asks for, and the benchmark reads them. A sample is compared at the end.

use super::{
    program::{Finished, Outcome, Program, failure},
    setup::Setup,
    swap::free_port,
};
use crate::bench::{
    process::{Guarded, describe, eventually, require},
    region::noise,
};
use anyhow::{Context as _, bail, ensure};
use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

const VALUE_BYTES: usize = 1024;

/// What a key costs beside its value: entry, key, headers, the allocator's rounding.
const OVERHEAD_BYTES: u64 = 300;

/// Commands in one pipelined batch.
const BATCH: u64 = 256;

/// Values compared at the end of a run, spread over all keys.
const SAMPLES: u64 = 1000;

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
        let keys = (bytes / (VALUE_BYTES as u64 + OVERHEAD_BYTES)).max(SAMPLES);
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
        Ok(Outcome::Finished(Finished { elapsed, peak_bytes }))
    }
}

/// As much of the Redis protocol as this needs.
struct Client {
    stream: BufReader<TcpStream>,
}

fn key(number: u64) -> String {
    format!("key:{number:012}")
}

fn value(number: u64) -> [u8; VALUE_BYTES] {
    let mut bytes = [0; VALUE_BYTES];
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(noise(number)) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

impl Client {
    fn connect(port: u16) -> anyhow::Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))
            .context("redis-server does not answer")?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(120)))?;
        let mut client = Self { stream: BufReader::new(stream) };
        client.send(&[b"PING"])?;
        client.expect_line("+PONG")?;
        Ok(client)
    }

    fn send(&mut self, words: &[&[u8]]) -> anyhow::Result<()> {
        let mut command = Vec::new();
        append(&mut command, words);
        Ok(self.stream.get_mut().write_all(&command)?)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    fn expect_line(&mut self, expected: &str) -> anyhow::Result<()> {
        let line = self.line()?;
        ensure!(line == expected, "redis-server says {line:?} instead of {expected:?}");
        Ok(())
    }

    /// Sets every key; whether that was done before the deadline.
    fn fill(&mut self, keys: u64, deadline: Instant) -> anyhow::Result<bool> {
        for first in (0..keys).step_by(BATCH as usize) {
            let batch = first..keys.min(first + BATCH);
            let mut commands = Vec::new();
            for number in batch.clone() {
                append(&mut commands, &[b"SET", key(number).as_bytes(), &value(number)]);
            }
            self.stream.get_mut().write_all(&commands)?;
            for _ in batch {
                self.expect_line("+OK")?;
            }
            crate::bench::interrupt::check()?;
            if Instant::now() >= deadline {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn compare(&mut self, keys: u64) -> anyhow::Result<()> {
        for number in (0..keys).step_by((keys / SAMPLES).max(1) as usize) {
            self.send(&[b"GET", key(number).as_bytes()])?;
            self.expect_line(&format!("${VALUE_BYTES}"))?;
            let mut found = [0; VALUE_BYTES + 2];
            self.stream.read_exact(&mut found)?;
            if found[..VALUE_BYTES] != value(number) {
                bail!("redis-server has another value for {} than was set", key(number));
            }
        }
        Ok(())
    }
}

fn append(commands: &mut Vec<u8>, words: &[&[u8]]) {
    commands.extend(format!("*{}\r\n", words.len()).bytes());
    for word in words {
        commands.extend(format!("${}\r\n", word.len()).bytes());
        commands.extend_from_slice(word);
        commands.extend_from_slice(b"\r\n");
    }
}
