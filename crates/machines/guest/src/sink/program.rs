//! Programs that are run to their end, or to the end of their time.

use super::{Ending, SinkError};
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How often it is looked whether a program has ended.
const POLL: Duration = Duration::from_millis(5);

/// Most of what a program says that is read.
const MAX_OUTPUT_BYTES: u64 = 16 << 10;

/// Runs a program; what it has said on both its outputs. It is killed with all that it has started,
/// as far as that is in its process group, when its time is up or the manager ends.
pub(crate) fn run(
    command: &mut Command,
    patience: Duration,
    ending: &Ending,
) -> Result<String, SinkError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |source| SinkError::Start { program: program.clone(), source };
    // A memory file, and no pipe: nobody has to read while it runs, nor waits for what it leaves
    // behind.
    let mut output: File =
        rustix::fs::memfd_create("hecaton-output", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|errno| failed(errno.into()))?
            .into();
    command.stdin(Stdio::null()).process_group(0);
    command.stdout(output.try_clone().map_err(failed)?);
    command.stderr(output.try_clone().map_err(failed)?);
    let mut child = command.spawn().map_err(failed)?;
    let begun = Instant::now();
    let status = loop {
        match child.try_wait().map_err(failed)? {
            Some(status) => break status,
            None if ending.is_set() || begun.elapsed() >= patience => {
                kill(&mut child);
                let how = match ending.is_set() {
                    true => "was ended, as the manager ends".to_owned(),
                    false => format!("was ended, as it took more than {} s", patience.as_secs()),
                };
                return Err(SinkError::Failed { program, how });
            }
            None => thread::sleep(POLL),
        }
    };
    let mut said = Vec::new();
    output.rewind().map_err(failed)?;
    output.take(MAX_OUTPUT_BYTES).read_to_end(&mut said).map_err(failed)?;
    let said = String::from_utf8_lossy(&said).into_owned();
    match status.success() {
        true => Ok(said),
        false => Err(SinkError::Failed { program, how: explain(status, &said) }),
    }
}

fn kill(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process_group(group, Signal::KILL);
    }
    let _ = child.wait();
}

fn explain(status: ExitStatus, said: &str) -> String {
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (_, Some(signal)) => format!("was ended by signal {signal}"),
        _ => "ended".to_owned(),
    };
    // The last line that is no frame of a Java stack.
    let says = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("at ");
    match said.lines().rev().find(says) {
        Some(line) => format!("{how}: {}", line.trim()),
        None => how,
    }
}
