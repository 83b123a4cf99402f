//! Lists the items, imports and named paths of one Rust file.
//!
//! The lexer is `proc-macro2`, so strings, comments and nested brackets need no care here. A full
//! parser (`syn`) is rejected: it skips the arguments of macros, and many paths stand there.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use std::collections::BTreeSet;

/// The declarations of one module. Code under `#[cfg(test)]` is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Source {
    /// Names of functions, types, traits, constants and macros.
    pub(super) items: BTreeSet<String>,
    pub(super) uses: Vec<Use>,
    pub(super) modules: Vec<Declared>,
    /// Paths in code, without those of `use` declarations.
    pub(super) paths: BTreeSet<Vec<String>>,
}

/// One leaf of a `use` declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Use {
    /// The first segment is empty if the declaration begins with `::`.
    pub(super) path: Vec<String>,
    pub(super) binding: Binding,
    /// Whether the declaration is `pub`, with or without a restriction.
    pub(super) reexport: bool,
}

/// The names that a `use` leaf brings into its module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Binding {
    Name(String),
    /// `*`
    Glob,
    /// `as _`
    Unnamed,
}

/// One `mod` declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Declared {
    pub(super) name: String,
    /// Value of the attribute `#[path = "..."]`.
    pub(super) path: Option<String>,
    /// The block of the declaration; `None` if a file has it.
    pub(super) inline: Option<Source>,
}

/// The tokens of one item, without attributes and visibility.
struct Item<'a> {
    attributes: Vec<&'a Group>,
    public: bool,
    tokens: &'a [TokenTree],
}

impl Source {
    /// Reads the text of a file. The result is empty if the text is not Rust.
    pub(super) fn parse(text: &str) -> Source {
        let mut source = Source::default();
        if let Ok(tokens) = text.parse() {
            source.read_items(tokens);
        }
        source
    }

    fn read_items(&mut self, stream: TokenStream) {
        let tokens: Vec<TokenTree> = stream.into_iter().collect();
        let mut rest = tokens.as_slice();
        while !rest.is_empty() {
            let (item, after) = split_item(rest);
            rest = after;
            if !item.attributes.iter().any(|group| is_for_tests(group)) {
                self.read_item(&item);
            }
        }
    }

    fn read_item(&mut self, item: &Item<'_>) {
        let tokens = &item.tokens[keyword(item.tokens)..];
        match (word(tokens, 0).as_deref(), tokens.get(1)) {
            (Some("mod"), _) => self.modules.extend(read_module(item, tokens)),
            (Some("use"), _) => self.read_use(Vec::new(), &tokens[1..], item.public),
            (Some("macro_rules"), _) => {
                self.items.extend(word(tokens, 2));
                self.read_code(&tokens[2..]);
            }
            (
                Some("fn" | "struct" | "enum" | "union" | "trait" | "type" | "const" | "static"),
                Some(TokenTree::Ident(_)),
            ) => {
                let at = if word(tokens, 1).as_deref() == Some("mut") { 2 } else { 1 };
                self.items.extend(word(tokens, at));
                self.read_code(&tokens[at..]);
            }
            (None, _) => match tokens.first() {
                // The block of `extern "C" { ... }`.
                Some(TokenTree::Group(block)) if block.delimiter() == Delimiter::Brace => {
                    self.read_items(block.stream());
                }
                _ => self.read_code(tokens),
            },
            _ => self.read_code(tokens),
        }
    }

    /// Records the leaves of a `use` tree that stands below `path`.
    fn read_use(&mut self, mut path: Vec<String>, tokens: &[TokenTree], reexport: bool) {
        let mut at = 0;
        if is_double_colon(tokens, at) {
            path.push(String::new());
            at += 2;
        }
        while let Some(segment) = word(tokens, at).filter(|_| is_double_colon(tokens, at + 1)) {
            path.push(segment);
            at += 3;
        }
        let binding = match tokens.get(at) {
            Some(TokenTree::Group(group)) => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                for part in inner.split(|token| is_punct(token, ',')) {
                    self.read_use(path.clone(), part, reexport);
                }
                return;
            }
            Some(token) if is_punct(token, '*') => Binding::Glob,
            Some(TokenTree::Ident(_)) => {
                // `a::{self}` is the path `a`.
                path.extend(word(tokens, at).filter(|last| last != "self" || path.is_empty()));
                let alias = word(tokens, at + 1).and_then(|_| word(tokens, at + 2));
                match alias.or_else(|| path.last().cloned()) {
                    Some(name) if name != "_" => Binding::Name(name),
                    _ => Binding::Unnamed,
                }
            }
            _ => return,
        };
        self.uses.push(Use { path, binding, reexport });
    }

    /// Records the paths of an item's body, and the `use` declarations in its blocks.
    fn read_code(&mut self, tokens: &[TokenTree]) {
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += match token {
                TokenTree::Group(group) => {
                    self.read_code(&group.stream().into_iter().collect::<Vec<_>>());
                    1
                }
                TokenTree::Punct(_) if is_test_attribute(&tokens[at..]) => {
                    let item = &tokens[at + 2..];
                    2 + item.iter().position(is_end).map_or(item.len(), |last| last + 1)
                }
                // Not `impl Trait + use<'a>`.
                TokenTree::Ident(ident)
                    if ident == "use"
                        && !tokens.get(at + 1).is_some_and(|next| is_punct(next, '<')) =>
                {
                    let length = tokens[at..].iter().take_while(|token| !is_punct(token, ';'));
                    let length = length.count();
                    self.read_use(Vec::new(), &tokens[at + 1..at + length], false);
                    length
                }
                TokenTree::Ident(_) => {
                    let path = path_at(&tokens[at..]);
                    let length = 3 * path.len() - 2;
                    if begins_path(tokens, at) && !is_label(&tokens[at..], &path) {
                        self.paths.insert(path);
                    }
                    length
                }
                _ => 1,
            }
        }
    }
}

fn split_item(tokens: &[TokenTree]) -> (Item<'_>, &[TokenTree]) {
    let mut attributes = Vec::new();
    let mut at = 0;
    while let Some((group, length)) = attribute(&tokens[at..]) {
        attributes.push(group);
        at += length;
    }
    let public = word(tokens, at).as_deref() == Some("pub");
    if public {
        at += 1;
        if matches!(tokens.get(at), Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis)
        {
            at += 1;
        }
    }
    let (tokens, rest) = tokens[at..].split_at(item_length(&tokens[at..]));
    (Item { attributes, public, tokens }, rest)
}

/// The group of an attribute at the start of `tokens`, and the number of its tokens.
fn attribute(tokens: &[TokenTree]) -> Option<(&Group, usize)> {
    let length = match tokens {
        [mark, bang, ..] if is_punct(mark, '#') && is_punct(bang, '!') => 3,
        [mark, ..] if is_punct(mark, '#') => 2,
        _ => return None,
    };
    match tokens.get(length - 1) {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Bracket => {
            Some((group, length))
        }
        _ => None,
    }
}

/// Number of tokens until the end of the item: its block, or the semicolon.
fn item_length(tokens: &[TokenTree]) -> usize {
    let has_value = matches!(
        word(tokens, keyword(tokens)).as_deref(),
        Some("use" | "const" | "static" | "type")
    );
    let ends = |token: &TokenTree| is_punct(token, ';') || (!has_value && is_block(token));
    tokens.iter().position(ends).map_or(tokens.len(), |last| last + 1)
}

/// Index of the word that says the kind of an item, after `unsafe`, `extern "C"` and the like.
fn keyword(tokens: &[TokenTree]) -> usize {
    let mut at = 0;
    loop {
        let next = word(tokens, at + 1);
        at += match word(tokens, at).as_deref() {
            Some("unsafe" | "async" | "safe" | "auto" | "default") if tokens.len() > at + 1 => 1,
            Some("extern") if matches!(tokens.get(at + 1), Some(TokenTree::Literal(_))) => 2,
            Some("const")
                if matches!(next.as_deref(), Some("fn" | "unsafe" | "async" | "extern")) =>
            {
                1
            }
            _ => return at.min(tokens.len()),
        }
    }
}

fn read_module(item: &Item<'_>, tokens: &[TokenTree]) -> Option<Declared> {
    let inline = match tokens.get(2) {
        Some(TokenTree::Group(block)) => {
            let mut source = Source::default();
            source.read_items(block.stream());
            Some(source)
        }
        _ => None,
    };
    let path = item.attributes.iter().find_map(|group| {
        let tokens: Vec<TokenTree> = group.stream().into_iter().collect();
        let value = tokens.get(2).filter(|_| word(&tokens, 0).as_deref() == Some("path"))?;
        Some(value.to_string().trim_matches('"').to_owned())
    });
    Some(Declared { name: word(tokens, 1)?, path, inline })
}

/// Whether an attribute is `cfg` with a condition that holds only in tests.
fn is_for_tests(attribute: &Group) -> bool {
    let tokens: Vec<TokenTree> = attribute.stream().into_iter().collect();
    match &tokens[..] {
        [TokenTree::Ident(name), TokenTree::Group(condition)] if name == "cfg" => {
            requires_test(&condition.stream().into_iter().collect::<Vec<_>>())
        }
        _ => false,
    }
}

fn requires_test(condition: &[TokenTree]) -> bool {
    match condition {
        [TokenTree::Ident(name)] => name == "test",
        [TokenTree::Ident(name), TokenTree::Group(parts)] => {
            let tokens: Vec<TokenTree> = parts.stream().into_iter().collect();
            let mut parts =
                tokens.split(|token| is_punct(token, ',')).filter(|part| !part.is_empty());
            match name.to_string().as_str() {
                "all" => parts.any(requires_test),
                "any" => parts.all(requires_test),
                _ => false,
            }
        }
        _ => false,
    }
}

fn is_test_attribute(tokens: &[TokenTree]) -> bool {
    attribute(tokens).is_some_and(|(group, length)| length == 2 && is_for_tests(group))
}

/// Whether the token ends a statement, a field or a member.
fn is_end(token: &TokenTree) -> bool {
    is_punct(token, ';') || is_punct(token, ',') || is_block(token)
}

fn is_block(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
}

/// The segments of the path at the start of `tokens`, up to generic arguments. At least one.
fn path_at(tokens: &[TokenTree]) -> Vec<String> {
    let mut path: Vec<String> = word(tokens, 0).into_iter().collect();
    while is_double_colon(tokens, 3 * path.len() - 2) {
        match word(tokens, 3 * path.len()) {
            Some(segment) => path.push(segment),
            None => break,
        }
    }
    path
}

/// Whether the module defines the meaning of the name at `at`. Fields, lifetimes, declarations of
/// functions and later segments of a path have another meaning.
fn begins_path(tokens: &[TokenTree], at: usize) -> bool {
    let before = |distance: usize| at.checked_sub(distance).map(|index| &tokens[index]);
    let is_before = |distance, mark| before(distance).is_some_and(|token| is_punct(token, mark));
    match before(1) {
        Some(TokenTree::Punct(mark)) => match mark.as_char() {
            '.' => is_before(2, '.'),
            ':' => !is_before(2, ':'),
            '$' => matches!(&tokens[at], TokenTree::Ident(name) if name == "crate"),
            '\'' => false,
            _ => true,
        },
        Some(TokenTree::Ident(name)) => name != "fn",
        _ => true,
    }
}

/// Whether a colon follows the single name: a field, a parameter or a variable with a type.
fn is_label(tokens: &[TokenTree], path: &[String]) -> bool {
    let colon = tokens.get(1).is_some_and(|next| is_punct(next, ':'));
    path.len() == 1 && colon && !is_double_colon(tokens, 1)
}

fn is_double_colon(tokens: &[TokenTree], at: usize) -> bool {
    let colon = |at| tokens.get(at).is_some_and(|token| is_punct(token, ':'));
    colon(at) && colon(at + 1)
}

fn is_punct(token: &TokenTree, mark: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == mark)
}

/// The identifier at `at`, without `r#`.
fn word(tokens: &[TokenTree], at: usize) -> Option<String> {
    match tokens.get(at)? {
        TokenTree::Ident(ident) => {
            let mut name = ident.to_string();
            if name.starts_with("r#") {
                name.drain(..2);
            }
            Some(name)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
