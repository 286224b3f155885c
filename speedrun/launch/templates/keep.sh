# Copies the record to $out, also that of a failed run. Only one process of a run writes one.
keep() {
  local folder partial home
  for folder in "$record" "$record.checkpoints"; do
    [[ -e $folder ]] || continue
    partial=$out/.${folder##*/}.partial
    home=$out/${folder##*/}
    # A record of an earlier job with this name stays.
    if [[ -e $home ]]; then home+=-$(date -u +%Y%m%d-%H%M%S); fi
    rm -rf -- "$partial"
    cp -R -- "$folder" "$partial"
    mv -T -- "$partial" "$home"
    rm -rf -- "$folder"
    echo "record  $home"
  done
}

@@check
