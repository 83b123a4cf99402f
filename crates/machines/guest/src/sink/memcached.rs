//! memcached: `cache_memlimit`, live, and its pages given back one by one.
//!
//! A lower limit alone gives nothing back: memcached keeps the pages that it has. Each has to be
//! moved out of its slab class (`slabs reassign -1 0`: any class that has one to spare, to the pool
//! of free pages), from where it is freed while there are more than the limit allows.

use super::connection::{Address, Connection};
use super::{Progress, Sink, SinkError};
use crate::governor::Order;
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// The least that memcached takes.
const LEAST_MIB: u64 = 8;

/// How long pages are moved before it is looked whether there is another order.
const TURN: Duration = Duration::from_millis(200);

/// How long a page takes to be moved, roughly.
const MOVE_TIME: Duration = Duration::from_millis(1);

/// One memcached server.
pub(crate) struct Memcached {
    pub(crate) address: Address,
}

impl Memcached {
    fn limit(&self, limit_bytes: u64) -> Result<(Connection, u64), SinkError> {
        let mut connection = Connection::open(&self.address)?;
        let mib = (limit_bytes / MIB).max(LEAST_MIB);
        let command = format!("cache_memlimit {mib}");
        let answer = ask(&mut connection, &command)?;
        match answer.as_str() {
            "OK" => Ok((connection, mib * MIB)),
            _ => Err(connection.refused(&command, &answer)),
        }
    }
}

impl Sink for Memcached {
    fn tell(&mut self, order: &Order) -> Result<Progress, SinkError> {
        let (mut connection, limit_bytes) = self.limit(order.limit_bytes)?;
        let begun = Instant::now();
        while held_bytes(&mut connection)? > limit_bytes {
            if begun.elapsed() >= TURN {
                return Ok(Progress::Draining);
            }
            const MOVE: &str = "slabs reassign -1 0";
            let answer = ask(&mut connection, MOVE)?;
            // The answers while one is moved, and when the class that was picked has none to spare.
            let is_passing = ["OK", "BUSY", "NOSPARE", "NOTFULL", "BADCLASS"];
            if !is_passing.iter().any(|word| answer.starts_with(word)) {
                return Err(connection.refused(MOVE, &answer));
            }
            thread::sleep(MOVE_TIME);
        }
        Ok(Progress::Settled)
    }

    fn keep(&mut self, order: &Order) -> Result<(), SinkError> {
        self.limit(order.limit_bytes).map(drop)
    }
}

/// The memory of its slabs.
fn held_bytes(connection: &mut Connection) -> Result<u64, SinkError> {
    const COMMAND: &str = "stats slabs";
    let mut line = ask(connection, COMMAND)?;
    let mut held = None;
    while line != "END" {
        match line.strip_prefix("STAT ").and_then(|stat| stat.split_once(' ')) {
            Some(("total_malloced", bytes)) => held = bytes.parse().ok(),
            Some(_) => {}
            None => return Err(connection.refused(COMMAND, &line)),
        }
        line = connection.line(COMMAND)?;
    }
    held.ok_or_else(|| connection.refused(COMMAND, "there is no total_malloced in its answer"))
}

/// Gives a command; the first line of its answer.
fn ask(connection: &mut Connection, command: &str) -> Result<String, SinkError> {
    connection.send(command, format!("{command}\r\n").as_bytes())?;
    connection.line(command)
}
