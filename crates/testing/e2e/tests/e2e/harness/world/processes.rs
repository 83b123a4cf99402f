//! Notes what the processes of a world do when a wait has failed: soon they are gone.

use super::place;
use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
};

/// Printed with the logs.
const FILE: &str = "processes.log";

/// Writes a line for each process: its numbers, name and state, its processor time in ticks, and
/// what its threads wait for in the kernel. Outside of a world nothing is written.
pub(crate) fn note(missed: &str) {
    let Some(dir) = place::dir_of_any() else { return };
    let mut text = format!("still not: {missed}\n");
    text.push_str("process, parent, state, ticks, name: what its threads wait for\n");
    for process in numbered("/proc".as_ref()) {
        let _ = writeln!(text, "{}", line(&process).unwrap_or_default());
    }
    let file = File::options().create(true).append(true).open(dir.join(FILE));
    let _ = file.and_then(|mut file| file.write_all(text.as_bytes()));
}

/// The directories that are numbers, in their order.
fn numbered(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())))
        .collect();
    found.sort_unstable();
    found.into_iter().map(|(_, path)| path).collect()
}

/// None of one that is gone already.
fn line(process: &Path) -> Option<String> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    let (numbered_name, rest) = stat.rsplit_once(") ")?;
    let (number, name) = numbered_name.split_once(" (")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    let mut waits = BTreeMap::<String, u32>::new();
    for thread in numbered(&process.join("task")) {
        let place = fs::read_to_string(thread.join("wchan")).unwrap_or_default();
        *waits.entry(place).or_default() += 1;
    }
    let waits: Vec<String> =
        waits.iter().map(|(place, threads)| format!("{threads} {place}")).collect();
    let (state, parent) = (fields.first()?, fields.get(1)?);
    Some(format!("{number} {parent} {state} {ticks} {name}: {}", waits.join(", ")))
}
