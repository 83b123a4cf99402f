//! How a command says that it was used wrongly: exit status 2, where other failures end with 1.

use clap::error::ErrorKind;
use std::process::ExitCode;

/// Bad usage: what was wrong, with which value, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

/// Fails with [`Usage`].
macro_rules! usage {
    ($($message:tt)*) => {
        return Err($crate::failure::Usage(format!($($message)*)).into())
    };
}
pub(crate) use usage;

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
