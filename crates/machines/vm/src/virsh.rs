//! `virsh`, libvirt's command, as a process that is waited for no longer than one likes.
//!
//! A process is used and not the library: a libvirt that hangs blocks only that process. Any
//! version and connection that `virsh` knows will do. Each question is asked once, and a late
//! answer is waited for. A repeated question would hold one more of libvirt's threads, until it has
//! none left.

use crate::domain::MAX_DOMAIN_BYTES;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The program.
const PROGRAM: &str = "virsh";

/// Between two looks whether it has ended.
const TICK: Duration = Duration::from_millis(5);

/// The same for one that is late.
const LATE_TICK: Duration = Duration::from_millis(50);

/// How long one that is late is waited for before it is killed, and may be asked again.
const GIVE_UP: Duration = Duration::from_secs(60);

/// Most of what it says that is read.
const MAX_BYTES: u64 = MAX_DOMAIN_BYTES as u64 + 1;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum VirshError {
    /// It cannot be started.
    #[error(
        "cannot run virsh, which is libvirt's command; install libvirt-clients, or its like: {0}"
    )]
    Start(io::Error),
    /// It was waited for in vain.
    #[error("`virsh {word}` has not answered after {} s", .after.as_secs())]
    Silent {
        /// Its first word.
        word: String,
        /// How long it had.
        after: Duration,
    },
    /// Nobody waits any more.
    #[error("`virsh {0}` is not waited for any more")]
    Ended(String),
    /// It failed.
    #[error("virsh {word}: {reason}")]
    Failed {
        /// Its first word.
        word: String,
        /// Last line of the error output, or the exit status.
        reason: String,
    },
    /// The output or the exit status cannot be read.
    #[error("what `virsh {word}` says cannot be read: {source}")]
    Unreadable {
        /// Its first word.
        word: String,
        /// Why not.
        source: io::Error,
    },
}

/// A connection to libvirt, which is made anew for each question.
#[derive(Clone, Debug)]
pub struct Virsh {
    uri: String,
}

impl Virsh {
    /// To this URI, as virsh knows it.
    pub fn new(uri: String) -> Virsh {
        Virsh { uri }
    }

    /// Where to.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Asks, and waits for the answer. Once it is late, after `patience`, `late` is called again
    /// and again; when it says `false` nobody waits any more.
    pub fn ask(
        &self,
        words: &[&str],
        patience: Duration,
        mut late: impl FnMut() -> bool,
    ) -> Result<String, VirshError> {
        let word = words.first().copied().unwrap_or_default().to_owned();
        let (mut said, mut complained) = files().map_err(VirshError::Start)?;
        let outputs = said.try_clone().and_then(|said| Ok((said, complained.try_clone()?)));
        let (output, complaint) = outputs.map_err(VirshError::Start)?;
        let mut command = Command::new(PROGRAM);
        command.env("LC_ALL", "C").args(["--quiet", "--connect", &self.uri]).args(words);
        command.stdin(Stdio::null()).stdout(output).stderr(complaint);
        let mut running = Running(command.spawn().map_err(VirshError::Start)?);
        let begun = Instant::now();
        let status = loop {
            match running.0.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) => {}
                Err(source) => return Err(VirshError::Unreadable { word, source }),
            }
            let is_late = begun.elapsed() > patience;
            if is_late && !late() {
                return Err(VirshError::Ended(word));
            }
            if begun.elapsed() > patience.max(GIVE_UP) {
                return Err(VirshError::Silent { word, after: begun.elapsed() });
            }
            thread::sleep(if is_late { LATE_TICK } else { TICK });
        };
        answer(word, status, &mut said, &mut complained)
    }
}

/// Ended and waited for, however this is left.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended already is not there to be killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Files and not pipes, so that it does not wait for whoever waits for it.
fn files() -> io::Result<(File, File)> {
    let file = |name| Ok::<_, io::Error>(File::from(memfd_create(name, MemfdFlags::CLOEXEC)?));
    Ok((file("virsh-output")?, file("virsh-complaint")?))
}

fn answer(
    word: String,
    status: ExitStatus,
    said: &mut File,
    complained: &mut File,
) -> Result<String, VirshError> {
    let (said, complained) = match (text(said), text(complained)) {
        (Ok(said), Ok(complained)) => (said, complained),
        (Err(source), _) | (_, Err(source)) => return Err(VirshError::Unreadable { word, source }),
    };
    if status.success() {
        return Ok(said);
    }
    // The last line is the reason; those before it say what did not work for that reason.
    let lines = complained.lines().map(|line| line.trim().trim_start_matches("error: "));
    let reason = lines.rev().find(|line| !line.is_empty()).map(str::to_owned);
    Err(VirshError::Failed { word, reason: reason.unwrap_or_else(|| status.to_string()) })
}

fn text(file: &mut File) -> io::Result<String> {
    let mut text = String::new();
    file.rewind()?;
    file.take(MAX_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_says_is_the_answer_and_its_last_complaint_the_reason() {
        let (mut said, mut complained) = files().expect("files");
        let mut shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdin(Stdio::null());
            command.stdout(said.try_clone().unwrap()).stderr(complained.try_clone().unwrap());
            let status = command.status().expect("a shell");
            answer("list".to_owned(), status, &mut said, &mut complained)
        };
        assert_eq!(shell("echo a; echo b").expect("it succeeds"), "a\nb\n");
        let script = "echo 'error: failed to connect' >&2; echo 'error: no such file' >&2; exit 1";
        let error = shell(script).expect_err("it fails").to_string();
        assert_eq!(error, "virsh list: no such file");
    }
}
