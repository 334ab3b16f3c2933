//! Identifiers and chance.

use uuid::Uuid;

/// The bytes of a new task id: UUIDv7, so that ids sort by the time they were made, in one session strictly. The last byte, random otherwise, is the task's
/// retention class (`history`); what is left of chance, 66 bits within a millisecond, keeps ids apart.
pub fn task(class: u8) -> [u8; 16] {
    let mut id = *Uuid::now_v7().as_bytes();
    id[15] = class;
    id
}

/// The bytes of a new lease: random from the operating system, since a lease is a capability.
pub fn lease() -> [u8; 16] {
    *Uuid::new_v4().as_bytes()
}

/// As [`lease`], for so many at once: one call to the operating system is half of what each costs alone.
pub fn leases(count: usize) -> impl Iterator<Item = [u8; 16]> {
    let mut bytes = vec![0; count * 16];
    let filled = getrandom::fill(&mut bytes).is_ok();
    (0..count).map(move |at| match bytes[at * 16..][..16].try_into() {
        Ok(random) if filled => *uuid::Builder::from_random_bytes(random).as_uuid().as_bytes(),
        _ => lease(),
    })
}

/// An id that is written as PostgreSQL writes it. Other forms that a uuid may have are left to PostgreSQL.
pub fn plain(text: &[u8]) -> Option<[u8; 16]> {
    const HYPHENS: [usize; 4] = [8, 13, 18, 23];
    if text.len() != 36 || HYPHENS.iter().any(|at| text[*at] != b'-') {
        return None;
    }
    let digit = |at: usize| match text[at] {
        digit @ b'0'..=b'9' => Some(digit - b'0'),
        digit @ b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut id = [0; 16];
    let mut at = 0;
    for byte in &mut id {
        at += usize::from(HYPHENS.contains(&at));
        *byte = digit(at)? << 4 | digit(at + 1)?;
        at += 2;
    }
    Some(id)
}

/// A share from 0 to 1, for jitter.
pub fn draw() -> f64 {
    // The low 32 bits of a version 4 UUID are all random.
    f64::from(Uuid::new_v4().as_u128() as u32) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    #[test]
    fn ids_of_one_session_rise_and_leases_never_repeat() {
        let ids: Vec<_> = (0..10_000).map(|_| super::task(7)).collect();
        assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(ids.iter().all(|id| id[15] == 7));
        let leases: std::collections::HashSet<_> = (0..10_000).map(|_| super::lease()).collect();
        assert_eq!(leases.len(), 10_000);
    }

    #[test]
    fn leases_made_at_once_are_like_others() {
        let leases: std::collections::HashSet<_> = super::leases(1000).collect();
        assert_eq!(leases.len(), 1000);
        assert!(leases.iter().all(|lease| lease[6] >> 4 == 4 && lease[8] >> 6 == 2));
        assert_eq!(super::leases(0).count(), 0);
    }

    #[test]
    fn ids_are_read_as_they_are_written() {
        for _ in 0..1000 {
            let id = uuid::Uuid::new_v4();
            assert_eq!(super::plain(id.to_string().as_bytes()), Some(*id.as_bytes()));
        }
        let id = "01234567-89ab-cdef-0123-456789abcdef";
        assert_eq!(super::plain(id.as_bytes()).map(|id| id[7]), Some(0xef));
        for other in ["", "0123456789abcdef0123456789abcdef", "{01234567-89ab-cdef-0123-456789abcdef}", &id.to_uppercase(), &id.replace('-', "0")] {
            assert_eq!(super::plain(other.as_bytes()), None, "{other}");
        }
        (0..36).for_each(|at| assert_eq!(super::plain(format!("{}x{}", &id[..at], &id[at + 1..]).as_bytes()), None));
    }

    #[test]
    fn draws_fill_the_unit_interval() {
        let draws: Vec<f64> = (0..10_000).map(|_| super::draw()).collect();
        assert!(draws.iter().all(|draw| (0.0..=1.0).contains(draw)));
        let mean = draws.iter().sum::<f64>() / 10_000.0;
        assert!((0.47..0.53).contains(&mean), "{mean}");
    }
}
