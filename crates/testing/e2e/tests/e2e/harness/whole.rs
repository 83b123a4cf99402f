//! Whether what programs and volumes keep in the pool has all of its copies.

use super::cluster::{Cluster, PATIENCE, all, is_since};
use hecaton_memory::unix_time_ms;
use serde_json::Value;
use std::time::Duration;

impl Cluster {
    /// Waits until everything has all copies, by statistics taken after this was called.
    pub(crate) fn until_whole(&self) -> anyhow::Result<()> {
        self.until_these_are_whole(Duration::ZERO, &|_| true)
    }

    /// Waits until these programs and volumes are there and have all copies, by statistics taken at
    /// least `delay` after this was called. A request that waits for a donor that has just come
    /// back may still give it up, within the failover time.
    pub(crate) fn until_whole_after(&self, delay: Duration, names: &[&str]) -> anyhow::Result<()> {
        let are_there = |status: &Value| {
            let is_there = |name: &&str| users(status).any(|user| user["name"] == **name);
            names.iter().all(is_there)
        };
        self.eventually("all are known", PATIENCE, |status| Ok(are_there(status)))?;
        self.until_these_are_whole(delay, &|user| names.iter().any(|name| user["name"] == **name))
    }

    fn until_these_are_whole(
        &self,
        delay: Duration,
        is_of_them: &dyn Fn(&Value) -> bool,
    ) -> anyhow::Result<()> {
        let since_ms = unix_time_ms() + delay.as_millis() as u64;
        self.until_status("everything has all copies", PATIENCE + delay, |status| {
            let of_them = users(status).filter(|user| is_of_them(user));
            let lacks: Vec<_> = of_them.filter_map(|user| lack(status, user, since_ms)).collect();
            if lacks.is_empty() { Ok(()) } else { Err(lacks.join("\n    ")) }
        })
    }
}

/// The programs and volumes of a status.
pub(crate) fn users(status: &Value) -> impl Iterator<Item = &Value> {
    all(status, "consumers").chain(all(status, "volumes"))
}

/// The donors that a program or a volume has pages at.
pub(crate) fn used_donors(stats: &Value) -> impl Iterator<Item = &Value> {
    let donors = stats["pool"]["donors"].as_array().into_iter().flatten();
    donors.filter(|one| one["bytes"].as_u64().or(one["bytes_held"].as_u64()) > Some(0))
}

/// Whether a donor does not answer, or others serve in its place.
pub(crate) fn is_missing(donor: &Value) -> bool {
    donor["reachable"] == false || donor["overdue"] == true
}

/// Says why a program or a volume is not whole, by statistics of that moment or later; nothing if
/// it is.
fn lack(status: &Value, user: &Value, since_ms: u64) -> Option<String> {
    let stats = &user["stats"];
    let pool = &stats["pool"];
    // A program counts bytes, a volume segments.
    let is_none =
        |bytes: &str, segments: &str| pool[bytes].as_u64().or(pool[segments].as_u64()) == Some(0);
    // A donor of which the manager knows another life has nothing of what it had.
    let is_this_life = |used: &Value| {
        let mut known = all(status, "donors").filter(|donor| donor["name"] == used["name"]);
        known.all(|donor| donor["stats"]["boot"] == used["boot"])
    };
    let is_there = |used: &Value| !is_missing(used) && is_this_life(used);
    let is_whole = is_since(stats, since_ms)
        && is_none("degraded_bytes", "segments_degraded")
        && is_none("to_move_bytes", "segments_untended")
        && used_donors(stats).all(is_there);
    let taken_ms = stats["taken_at_ms"].as_u64().unwrap_or_default();
    let age = i128::from(taken_ms) - i128::from(since_ms);
    (!is_whole).then(|| format!("{}, {age} ms after: {pool}", user["name"]))
}
