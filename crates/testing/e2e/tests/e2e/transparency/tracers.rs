//! Runs tracers on the pool, together with the programs that they trace.

use super::native::same_as_native;
use crate::harness::{Outcome, TestResult, cluster::Cluster, process::missing_any};
use anyhow::Context as _;

/// More memory than is local, in the traced process; it also starts another.
const SCRIPT: &str = "
import subprocess
size = 60 << 20
memory = bytearray(size)
for at in range(0, size, 4096):
    memory[at:at + 8] = at.to_bytes(8, 'little')
assert all(memory[at:at + 8] == at.to_bytes(8, 'little') for at in range(0, size, 4096))
print(subprocess.run(['echo', 'verified'], capture_output=True).stdout)
";

/// strace waits for pages of its own while the program that it traces stands still.
pub(crate) fn strace_follows(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["strace", "python3"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let trace = cluster.file("trace");
    let trace = trace.to_str().context("a path of letters")?;
    let command = ["strace", "-f", "-o", trace, "python3", "-c", SCRIPT];
    same_as_native(cluster, "16M", &command)?;
    Ok(Outcome::Passed)
}
