//! Names the rules, their units and the way out of a violation.

/// One rule over the repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// No file imports itself through other files of its crate.
    Circles,
    /// No crate depends on a crate of a higher floor.
    Floors,
    /// A folder holds at most 12 Rust files.
    Folders,
    /// A Rust file has at most 500 lines, or 800 with a reason in its header.
    Lines,
    /// A module header begins with a plain statement.
    Headers,
    /// A comment line or a Markdown line has at most 100 columns.
    Columns,
}

impl Rule {
    /// Every rule, in the order of `counts.toml`.
    pub const ALL: [Rule; 6] =
        [Rule::Circles, Rule::Floors, Rule::Folders, Rule::Lines, Rule::Headers, Rule::Columns];

    /// The name of the rule's table in `counts.toml`.
    pub fn name(self) -> &'static str {
        match self {
            Rule::Circles => "circles",
            Rule::Floors => "floors",
            Rule::Folders => "folders",
            Rule::Lines => "lines",
            Rule::Headers => "headers",
            Rule::Columns => "columns",
        }
    }

    /// The meaning of a key and its value.
    pub fn meaning(self) -> &'static str {
        match self {
            Rule::Circles => "file = imports that lead back to the file through its own crate",
            Rule::Floors => "crate = dependencies on crates that it must not use",
            Rule::Folders => "folder = Rust files in it, above 12",
            Rule::Lines => "file = lines, above 500 (above 800 with a reason in the header)",
            Rule::Headers => "file = 1 if its header begins with What, Who, Of and the like",
            Rule::Columns => "file = comment and Markdown lines above 100 columns",
        }
    }

    /// The way out of a violation, as an imperative sentence.
    pub fn way_out(self) -> &'static str {
        match self {
            Rule::Circles => {
                "move the shared item to a file below both, or pass it in as an argument or a trait"
            }
            Rule::Floors => {
                "move the shared code to a lower floor, or the crate to a higher one; \
                 crates/testing/tidy/src/floors.rs lists the floors"
            }
            Rule::Folders => "group files that belong together in a subfolder",
            Rule::Lines => {
                "split the file by concept; up to 800 lines are accepted when the header has a \
                 line that begins with `//! Longer than 500 lines because`"
            }
            Rule::Headers => {
                "say in the first line what the module does: subject or verb first, \
                 as in \"Resolves page faults of one consumer.\""
            }
            Rule::Columns => "wrap the line at 100 columns",
        }
    }
}

/// One offender of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The violated rule.
    pub rule: Rule,
    /// Path of the file, folder or crate from the root of the repository.
    pub path: String,
    /// See [`Rule::meaning`] for the unit. At least 1.
    pub value: u32,
    /// The evidence, for example the files of a circle. Empty if the value says all.
    pub detail: String,
}
