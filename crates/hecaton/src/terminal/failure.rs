//! Turns failures of this command into exit statuses.
//!
//! | failure | exit status |
//! |---|---|
//! | bad usage | 2 |
//! | the program to run does not exist | 127, as of `env`, `timeout` and shells |
//! | the program exists and cannot be run | 126, the same |
//! | any other | 1 |

use clap::error::ErrorKind;
use std::io;
use std::process::ExitCode;

/// Bad usage: what was wrong, with which value, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

/// Fails with [`Usage`].
macro_rules! usage {
    ($($message:tt)*) => {
        return Err($crate::terminal::failure::Usage(format!($($message)*)).into())
    };
}
pub(crate) use usage;

/// The program that this command was to run does not exist, or cannot be run.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct CannotRun {
    message: String,
    is_missing: bool,
}

impl CannotRun {
    /// The program exists.
    pub(crate) fn refused(message: String) -> Self {
        Self { message, is_missing: false }
    }

    /// The program does not exist.
    pub(crate) fn missing(message: String) -> Self {
        Self { message, is_missing: true }
    }

    /// The kernel's error for the program tells which of the two it is.
    pub(crate) fn because(error: &io::Error, message: String) -> Self {
        Self { message, is_missing: error.kind() == io::ErrorKind::NotFound }
    }
}

/// The exit status of a command that fails with this error.
pub(crate) fn status(error: &anyhow::Error) -> u8 {
    match error.downcast_ref::<CannotRun>() {
        Some(CannotRun { is_missing: true, .. }) => 127,
        Some(_) => 126,
        None if error.is::<Usage>() => 2,
        None => 1,
    }
}

/// Says in one line what is wrong with the arguments; prints what was asked for, if that is the
/// help or the version.
pub(crate) fn explain_arguments(error: &clap::Error) -> ExitCode {
    let nothing_asked = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if nothing_asked || !error.use_stderr() {
        // A reader that has closed the pipe has seen enough.
        let _ = error.print();
        return ExitCode::from(if nothing_asked { 2 } else { 0 });
    }
    eprintln!("hecaton: {}; see --help", in_one_line(&error.render().to_string()));
    ExitCode::from(2)
}

/// The message without the usage lines that follow it.
fn in_one_line(rendered: &str) -> String {
    let message = rendered.strip_prefix("error: ").unwrap_or(rendered);
    let end = ["\n\nUsage:", "\n\nFor more information"]
        .into_iter()
        .filter_map(|mark| message.find(mark))
        .min()
        .unwrap_or(message.len());
    message[..end].split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_status_says_whether_the_program_exists() {
        let because = |kind| CannotRun::because(&io::Error::from(kind), "x".into()).into();
        assert_eq!(status(&because(io::ErrorKind::NotFound)), 127);
        assert_eq!(status(&because(io::ErrorKind::PermissionDenied)), 126);
        assert_eq!(status(&CannotRun::missing("x".into()).into()), 127);
        assert_eq!(status(&CannotRun::refused("x".into()).into()), 126);
        assert_eq!(status(&Usage("x".into()).into()), 2);
        assert_eq!(status(&anyhow::anyhow!("x")), 1);
    }

    #[test]
    fn messages_are_one_line() {
        let rendered = "error: unrecognized subcommand 'nod'\n\n  tip: a similar subcommand \
                        exists: 'node'\n\nUsage: hecaton [OPTIONS] <COMMAND>\n\nFor more \
                        information, try '--help'.\n";
        assert_eq!(
            in_one_line(rendered),
            "unrecognized subcommand 'nod' tip: a similar subcommand exists: 'node'"
        );
    }
}
