//! Finding the name somebody meant.

/// The candidate nearest to `name`, if one is near enough to be a slip of the keyboard.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&name.to_lowercase(), &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.chars().count() / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn a_slip_is_recognised_and_a_stranger_is_not() {
        assert_eq!(nearest("extrct", ["extract", "review"]), Some("extract"));
        assert_eq!(nearest("Priority", ["priority", "payload"]), Some("priority"));
        assert_eq!(nearest("invoices", ["extract", "review"]), None);
        assert_eq!(nearest("x", []), None);
    }
}
