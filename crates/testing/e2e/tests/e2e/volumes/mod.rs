//! Volumes, as each kind of client sees them.

pub(crate) mod disk;
pub(crate) mod drive;
pub(crate) mod file;
pub(crate) mod nbd_clients;
pub(crate) mod sharing;
pub(crate) mod volume;

use crate::harness::{
    cluster::{PATIENCE, is_since},
    wait::until,
};
use hecaton_memory::unix_time_ms;
use serde_json::Value;

/// Waits until a volume's clients have written more to it than at this moment.
pub(crate) fn until_more_is_written(
    status: impl Fn() -> anyhow::Result<Value>,
) -> anyhow::Result<()> {
    let written = |more_than: Option<u64>| {
        let since_ms = unix_time_ms();
        until("clients write to the volume", PATIENCE, || {
            let stats = status()?["stats"].clone();
            let written = stats["written_bytes"].as_u64();
            let is_more = is_since(&stats, since_ms) && written > more_than;
            Ok(if is_more { Ok(written) } else { Err(stats) })
        })
    };
    let before = written(None)?;
    written(before)?;
    Ok(())
}

/// Waits until a volume has one client, and something was read from it.
pub(crate) fn until_its_client_reads(
    status: impl Fn() -> anyhow::Result<Value>,
) -> anyhow::Result<()> {
    let since_ms = unix_time_ms();
    until("the volume has a client, which reads", PATIENCE, || {
        let stats = status()?["stats"].clone();
        let is_read = stats["clients"] == 1 && stats["read_bytes"].as_u64() > Some(0);
        Ok(if is_read && is_since(&stats, since_ms) { Ok(()) } else { Err(stats) })
    })
}
