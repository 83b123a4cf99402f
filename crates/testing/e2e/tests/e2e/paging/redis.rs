//! Redis saves a snapshot from a forked child while clients write on.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, PATIENCE},
    process::{Running, missing},
    wait::{until, until_every},
};
use anyhow::{Context as _, bail, ensure};
use hecaton_e2e::Random;
use hecaton_testkit::scaled;
use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

const KEYS: usize = 30_000;
const VALUE_BYTES: usize = 1000;

const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn bgsave_under_load(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("redis-server") {
        return Ok(Outcome::Skipped(reason));
    }
    let dir = cluster.dir("redis")?;
    let mut redis = Redis::start(cluster.on_pool("16M", "redis-server"), &dir)?;
    let mut generations = vec![0_u64; KEYS];
    (0..KEYS).try_for_each(|key| redis.set(key, 0))?;

    // Two snapshots while keys are overwritten: the second also finds what the first one's child
    // has shared and given up.
    let mut random = Random(3);
    let mut writes = 0;
    for _ in 0..2 {
        let saved = redis.number("LASTSAVE")?;
        // Its answers have the resolution of a second.
        thread::sleep(Duration::from_millis(1100));
        redis.ask(&["BGSAVE"])?;
        until_every(Duration::ZERO, "the snapshot is finished", SNAPSHOT_PATIENCE, || {
            if redis.number("LASTSAVE")? != saved {
                return Ok(Ok(()));
            }
            for _ in 0..200 {
                let key = random.below(KEYS);
                generations[key] += 1;
                redis.set(key, generations[key])?;
                writes += 1;
            }
            Ok(Err(format!("the last one is that of {saved}, after {writes} writes")))
        })?;
        let info = redis.bulk(&["INFO", "persistence"])?;
        ensure!(info.contains("rdb_last_bgsave_status:ok"), "the snapshot failed: {info}");
    }
    ensure!(writes > 400, "there were only {writes} writes during the snapshots");
    for (key, generation) in generations.iter().enumerate() {
        redis.expect(key, *generation)?;
    }

    // The last snapshot, at rest, must hold exactly what the server holds.
    redis.ask(&["SAVE"])?;
    redis.shut_down()?;
    let mut plain = Redis::start(Command::new("redis-server"), &dir)?;
    for (key, generation) in generations.iter().enumerate() {
        plain.expect(key, *generation)?;
    }
    plain.shut_down()?;
    Ok(Outcome::Passed)
}

fn value(key: usize, generation: u64) -> String {
    let mut random = Random(key as u64 ^ generation << 40);
    let mut value = String::with_capacity(VALUE_BYTES + 16);
    while value.len() < VALUE_BYTES {
        value.push_str(&format!("{:016x}", random.next()));
    }
    value.truncate(VALUE_BYTES);
    value
}

/// A server with the only client it has.
pub(crate) struct Redis {
    server: Running,
    client: BufReader<UnixStream>,
}

impl Redis {
    /// Waits until the server has loaded what there is in `dir`, and answers.
    pub(crate) fn start(mut command: Command, dir: &Path) -> anyhow::Result<Redis> {
        let socket = dir.join("socket");
        // So the client cannot take a former server's socket for this server's.
        let _ = fs::remove_file(&socket);
        command
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(&socket)
            .arg("--dir")
            .arg(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let server = Running::spawn(&mut command)?;
        let connect = || {
            let stream = UnixStream::connect(&socket)?;
            stream.set_read_timeout(Some(scaled(PATIENCE)))?;
            anyhow::Ok(BufReader::new(stream))
        };
        let client = until("redis-server takes clients", PATIENCE, || Ok(connect()))?;
        let mut redis = Redis { server, client };
        until("redis-server answers", PATIENCE, || {
            let answered = redis.ask(&["PING"]).map(drop);
            if answered.is_err()
                && let Ok(client) = connect()
            {
                redis.client = client;
            }
            Ok(answered)
        })?;
        Ok(redis)
    }

    /// Without a snapshot.
    pub(crate) fn shut_down(mut self) -> anyhow::Result<()> {
        self.send(&["SHUTDOWN", "NOSAVE"])?;
        self.server.wait(PATIENCE, || Ok(()))?;
        Ok(())
    }

    fn send(&mut self, words: &[&str]) -> anyhow::Result<()> {
        let mut command = format!("*{}\r\n", words.len());
        for word in words {
            command.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        Ok(self.client.get_mut().write_all(command.as_bytes())?)
    }

    /// The first line of the answer.
    fn ask(&mut self, words: &[&str]) -> anyhow::Result<String> {
        self.send(words)?;
        let mut line = String::new();
        self.client.read_line(&mut line)?;
        if line.is_empty() || line.starts_with('-') {
            bail!("redis-server answers {:?} to {}", line.trim_end(), words[0]);
        }
        Ok(line.trim_end().to_owned())
    }

    fn number(&mut self, command: &str) -> anyhow::Result<u64> {
        let answer = self.ask(&[command])?;
        answer.trim_start_matches(':').parse().with_context(|| format!("{command}: {answer}"))
    }

    fn bulk(&mut self, words: &[&str]) -> anyhow::Result<String> {
        let head = self.ask(words)?;
        let length: usize = head.trim_start_matches('$').parse().context(head.clone())?;
        let mut body = vec![0; length + 2];
        self.client.read_exact(&mut body)?;
        body.truncate(length);
        Ok(String::from_utf8(body)?)
    }

    pub(crate) fn set(&mut self, key: usize, generation: u64) -> anyhow::Result<()> {
        self.ask(&["SET", &format!("key:{key}"), &value(key, generation)]).map(drop)
    }

    pub(crate) fn expect(&mut self, key: usize, generation: u64) -> anyhow::Result<()> {
        let found = self.bulk(&["GET", &format!("key:{key}")])?;
        ensure!(found == value(key, generation), "key {key} is not what was set last");
        Ok(())
    }
}
