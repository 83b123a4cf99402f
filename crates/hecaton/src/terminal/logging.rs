//! Structured logs on standard error.

use crate::terminal::failure::usage;
use std::env;
use std::io::{self, IsTerminal as _};
use tracing_subscriber::EnvFilter;

/// The variable that sets what is logged.
const VARIABLE: &str = "HECATON_LOG";

/// Log filter when the variable is not set.
const DEFAULT: &str = "warn";

/// Starts logging for this process.
pub(crate) fn start(json: bool) -> anyhow::Result<()> {
    let wanted = env::var(VARIABLE).ok().filter(|wanted| !wanted.is_empty());
    let wanted = wanted.as_deref().unwrap_or(DEFAULT);
    let Ok(filter) = EnvFilter::try_new(wanted) else {
        usage!("`{wanted}` in {VARIABLE} is not a log filter: write a level such as debug");
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    match json {
        true => builder.json().init(),
        false => builder.init(),
    }
    Ok(())
}
