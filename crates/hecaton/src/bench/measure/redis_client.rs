//! As much of the Redis protocol as the benches need: keys filled with values of their own, and
//! read again.
//!
//! redis-benchmark writes one and the same value to every key, which any compressing peer would
//! make vanish, and compares nothing. The keys have the names that it asks for.

use crate::bench::measure::region::noise;
use crate::bench::world::interrupt;
use anyhow::{Context as _, bail, ensure};
use hecaton_memory::SplitMix;
use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    ops::Range,
    time::{Duration, Instant},
};

const VALUE_BYTES: usize = 1024;

/// Bytes of a key beside its value: entry, key, headers, the allocator's rounding.
const OVERHEAD_BYTES: u64 = 300;

/// Memory that a server needs for a key and its value, in bytes, roughly.
pub(crate) const KEY_BYTES: u64 = VALUE_BYTES as u64 + OVERHEAD_BYTES;

/// Commands in one pipelined batch.
const BATCH: u64 = 256;

/// The same when keys are read one after the other, as a client would that asks for what it needs
/// next: small, so that waiting for a page is not hidden behind other work.
const QUERY_BATCH: u64 = 16;

/// Values compared at the end of a run, spread over all keys.
pub(crate) const SAMPLES: u64 = 1000;

/// A connection to a server on this host.
pub(crate) struct Client {
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
    pub(crate) fn connect(port: u16) -> anyhow::Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))
            .context("redis-server does not answer")?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(120)))?;
        let mut client = Self { stream: BufReader::new(stream) };
        client.send(&[b"PING"])?;
        client.expect_line("+PONG")?;
        Ok(client)
    }

    pub(crate) fn send(&mut self, words: &[&[u8]]) -> anyhow::Result<()> {
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
    pub(crate) fn fill(&mut self, keys: u64, deadline: Instant) -> anyhow::Result<bool> {
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
            interrupt::check()?;
            if Instant::now() >= deadline {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads random keys of a range, `count` of them in pipelined batches, and looks at the
    /// beginning of each value.
    pub(crate) fn query(
        &mut self,
        keys: Range<u64>,
        count: u64,
        random: &mut SplitMix,
    ) -> anyhow::Result<Duration> {
        ensure!(!keys.is_empty(), "no keys to read");
        let start = Instant::now();
        let mut left = count;
        while left > 0 {
            let batch: Vec<_> = (0..left.min(QUERY_BATCH))
                .map(|_| keys.start + random.draw() % (keys.end - keys.start))
                .collect();
            let mut commands = Vec::new();
            for number in &batch {
                append(&mut commands, &[b"GET", key(*number).as_bytes()]);
            }
            self.stream.get_mut().write_all(&commands)?;
            for number in &batch {
                let found = self.value()?;
                ensure!(
                    found[..8] == SplitMix::new(*number).draw().to_le_bytes(),
                    "redis-server has another value for {} than was set",
                    key(*number)
                );
            }
            left -= batch.len() as u64;
        }
        Ok(start.elapsed())
    }

    fn value(&mut self) -> anyhow::Result<[u8; VALUE_BYTES]> {
        self.expect_line(&format!("${VALUE_BYTES}"))?;
        let mut found = [0; VALUE_BYTES];
        self.stream.read_exact(&mut found)?;
        self.expect_line("")?;
        Ok(found)
    }

    pub(crate) fn compare(&mut self, keys: u64) -> anyhow::Result<()> {
        for number in (0..keys).step_by((keys / SAMPLES).max(1) as usize) {
            self.send(&[b"GET", key(number).as_bytes()])?;
            if self.value()? != value(number) {
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
