//! Redis saves a snapshot from a forked child while clients write on.

use crate::{
    cluster::{Cluster, PATIENCE},
    harness::{Outcome, TestResult},
    process::{Running, missing},
};
use anyhow::{Context as _, bail, ensure};
use hecaton_e2e::Random;
use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const KEYS: usize = 60_000;
const VALUE_BYTES: usize = 1000;

pub(crate) fn bgsave_under_load(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("redis-server") {
        return Ok(Outcome::Skipped(reason));
    }
    let dir = cluster.dir("redis")?;
    let serve = |mut command: Command, port: u16| {
        command
            .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", ""])
            .args(["--appendonly", "no", "--dir"])
            .arg(&dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        Running::spawn(&mut command)
    };

    let port = free_port()?;
    let mut server = serve(cluster.on_pool("32M", "redis-server"), port)?;
    let mut client = Client::connect(port)?;
    let mut generations = vec![0_u64; KEYS];
    (0..KEYS).try_for_each(|key| client.set(key, 0))?;

    // Two snapshots while keys are overwritten: the second also finds what the first one's child
    // has shared and given up.
    let mut random = Random(3);
    let mut writes = 0;
    for _ in 0..2 {
        let saved = client.number("LASTSAVE")?;
        // Its answers have the resolution of a second.
        thread::sleep(Duration::from_millis(1100));
        client.ask(&["BGSAVE"])?;
        let start = Instant::now();
        while client.number("LASTSAVE")? == saved {
            ensure!(start.elapsed() < Duration::from_secs(120), "the snapshot is not finished");
            for _ in 0..200 {
                let key = random.below(KEYS);
                generations[key] += 1;
                client.set(key, generations[key])?;
                writes += 1;
            }
        }
        let info = client.bulk(&["INFO", "persistence"])?;
        ensure!(info.contains("rdb_last_bgsave_status:ok"), "the snapshot failed: {info}");
    }
    ensure!(writes > 400, "there were only {writes} writes during the snapshots");
    for (key, generation) in generations.iter().enumerate() {
        client.expect(key, *generation)?;
    }

    // The last snapshot, at rest, must hold exactly what the server holds.
    client.ask(&["SAVE"])?;
    client.send(&["SHUTDOWN", "NOSAVE"])?;
    server.wait(PATIENCE, || Ok(()))?;
    let port = free_port()?;
    let mut plain = serve(Command::new("redis-server"), port)?;
    let mut client = Client::connect(port)?;
    for (key, generation) in generations.iter().enumerate() {
        client.expect(key, *generation)?;
    }
    client.send(&["SHUTDOWN", "NOSAVE"])?;
    plain.wait(PATIENCE, || Ok(()))?;
    Ok(Outcome::Passed)
}

fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
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

struct Client(BufReader<TcpStream>);

impl Client {
    /// Waits until the server has loaded its data and answers.
    fn connect(port: u16) -> anyhow::Result<Self> {
        let start = Instant::now();
        loop {
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                let mut client = Self(BufReader::new(stream));
                if client.ask(&["PING"]).is_ok() {
                    return Ok(client);
                }
            }
            ensure!(start.elapsed() < PATIENCE, "redis-server does not answer");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn send(&mut self, words: &[&str]) -> anyhow::Result<()> {
        let mut command = format!("*{}\r\n", words.len());
        for word in words {
            command.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        Ok(self.0.get_mut().write_all(command.as_bytes())?)
    }

    /// The first line of the answer.
    fn ask(&mut self, words: &[&str]) -> anyhow::Result<String> {
        self.send(words)?;
        let mut line = String::new();
        self.0.read_line(&mut line)?;
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
        self.0.read_exact(&mut body)?;
        body.truncate(length);
        Ok(String::from_utf8(body)?)
    }

    fn set(&mut self, key: usize, generation: u64) -> anyhow::Result<()> {
        self.ask(&["SET", &format!("key:{key}"), &value(key, generation)]).map(drop)
    }

    fn expect(&mut self, key: usize, generation: u64) -> anyhow::Result<()> {
        let found = self.bulk(&["GET", &format!("key:{key}")])?;
        ensure!(found == value(key, generation), "key {key} is not what was set last");
        Ok(())
    }
}
