//! Redis, and what speaks its protocol: `CONFIG SET maxmemory`, live.
//!
//! Four commands with flat answers are written out here: a client library would bring more code
//! than all of the manager.

use super::connection::{Address, Connection};
use super::{Progress, Sink, SinkError};
use crate::governor::{Order, Reason};
use std::fs;
use std::path::PathBuf;

/// Longest text that is taken.
const MAX_BULK_BYTES: usize = 1 << 20;

/// One Redis server.
pub(crate) struct Redis {
    pub(crate) address: Address,
    /// User name, from Redis 6 on; `None` for the default user.
    pub(crate) user: Option<String>,
    /// A file with the password alone, read anew for each connection.
    pub(crate) password_file: Option<PathBuf>,
}

impl Redis {
    fn connect(&self) -> Result<Connection, SinkError> {
        let mut connection = Connection::open(&self.address)?;
        if let Some(path) = &self.password_file {
            let password = fs::read_to_string(path)
                .map_err(|source| SinkError::Read { path: path.clone(), source })?;
            let password = password.trim_end_matches(['\r', '\n']);
            let words: Vec<&str> =
                ["AUTH"].into_iter().chain(self.user.as_deref()).chain([password]).collect();
            ask(&mut connection, "AUTH", &words)?;
        }
        Ok(connection)
    }

    fn limit(connection: &mut Connection, limit_bytes: u64) -> Result<(), SinkError> {
        // 0 would be no limit.
        let limit = limit_bytes.max(1).to_string();
        ask(connection, "CONFIG SET maxmemory", &["CONFIG", "SET", "maxmemory", &limit])?;
        Ok(())
    }
}

impl Sink for Redis {
    fn tell(&mut self, order: &Order) -> Result<Progress, SinkError> {
        let mut connection = self.connect()?;
        Redis::limit(&mut connection, order.limit_bytes)?;
        let info = ask(&mut connection, "INFO memory", &["INFO", "memory"])?;
        let Some(used_bytes) = counted_bytes(&info) else {
            return Err(connection.refused("INFO memory", "there is no used_memory in its answer"));
        };
        let progress = Progress::of(used_bytes, order.limit_bytes);
        if progress == Progress::Draining && field(&info, "maxmemory_policy") == Some("noeviction")
        {
            let limit_bytes = order.limit_bytes;
            return Err(SinkError::DropsNothing { used_bytes, limit_bytes });
        }
        if progress == Progress::Settled && order.reason != Reason::Grow {
            // Redis's allocator keeps freed memory for a while; the purge returns it to the guest
            // now.
            ask(&mut connection, "MEMORY PURGE", &["MEMORY", "PURGE"])?;
        }
        Ok(progress)
    }

    fn keep(&mut self, order: &Order) -> Result<(), SinkError> {
        Redis::limit(&mut self.connect()?, order.limit_bytes)
    }
}

/// Bytes that Redis counts against its `maxmemory`.
fn counted_bytes(info: &str) -> Option<u64> {
    let used: u64 = field(info, "used_memory")?.parse().ok()?;
    let not_counted = field(info, "mem_not_counted_for_evict").and_then(|text| text.parse().ok());
    Some(used.saturating_sub(not_counted.unwrap_or(0)))
}

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
}

/// Gives a command; the text of its answer. `name` is what errors call it, without what is secret.
fn ask(connection: &mut Connection, name: &str, words: &[&str]) -> Result<String, SinkError> {
    let mut command = format!("*{}\r\n", words.len());
    for word in words {
        command += &format!("${}\r\n{word}\r\n", word.len());
    }
    connection.send(name, command.as_bytes())?;
    let first = connection.line(name)?;
    match first.split_at_checked(1) {
        Some(("+" | ":", text)) => Ok(text.to_owned()),
        Some(("-", reason)) => Err(connection.refused(name, reason)),
        Some(("$", length)) => {
            let length = length.parse::<usize>().ok();
            let Some(length) = length.filter(|length| *length <= MAX_BULK_BYTES) else {
                return Err(connection.refused(name, &format!("it says `{first}`")));
            };
            let bytes = connection.bytes(name, length + "\r\n".len())?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        }
        _ => Err(connection.refused(name, &format!("it says `{first}`, which is not Redis"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_held_against_the_limit_is_not_counted() {
        let info = "# Memory\r\nused_memory:100\r\nused_memory_human:9\r\n\
                    maxmemory_policy:allkeys-lru\r\nmem_not_counted_for_evict:30\r\n";
        assert_eq!(counted_bytes(info), Some(70));
        assert_eq!(counted_bytes("used_memory:5\r\n"), Some(5));
        assert_eq!(counted_bytes("used_memory_human:5\r\n"), None);
        assert_eq!(field(info, "maxmemory_policy"), Some("allkeys-lru"));
    }
}
