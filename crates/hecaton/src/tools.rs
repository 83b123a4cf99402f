//! Programs of the system that are run to their end.

use anyhow::{Context as _, bail};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// Runs a tool to its end and returns what it said; its complaint is the error.
pub(crate) fn tool(program: &str, args: &[&str]) -> anyhow::Result<String> {
    let output = sbin_too(Command::new(program))
        .args(args)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run `{program}`"))?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        let last = complaint.lines().last().unwrap_or("without a word").trim();
        bail!("`{program} {}` {}: {last}", args.join(" "), describe(output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Tools such as mkswap are in directories that not every user has in the path.
fn sbin_too(mut command: Command) -> Command {
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

/// Looks for a program as a shell would.
pub(crate) fn require(program: &str, package: &str) -> anyhow::Result<()> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let found = path.split(':').any(|dir| std::path::Path::new(dir).join(program).is_file());
    anyhow::ensure!(found, "`{program}` is not installed (Debian package {package})");
    Ok(())
}

/// How a process ended, in words.
pub(crate) fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (_, Some(signal)) => format!("was ended by signal {signal}"),
        _ => "ended".to_owned(),
    }
}

/// Ends of processes and devices take a moment to be seen; teardown waits for it in any case.
pub(crate) fn eventually_even_if_interrupted<T, E>(
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    for _ in 0..200 {
        if let Ok(value) = attempt() {
            return Ok(value);
        }
        std::thread::sleep(Duration::from_millis(25));
    }
    attempt()
}

/// Runs a tool that takes something down, until it does; what cannot be taken down is a line in the
/// log.
pub(crate) fn take_down(program: &str, args: &[&str]) {
    if let Err(error) = eventually_even_if_interrupted(|| tool(program, args)) {
        tracing::warn!("{error:#}");
    }
}
